"""Read a Hugging Face checkpoint directory: safetensors only, one tensor at a time, every claim checked.

Every stored form that circulates is read, and which one a tensor has is found from its keys and contents,
never from what a configuration claims:

- plain tensors; sparse ones hold explicit zeros;
- a bitmask and the non-zeros (PackedEntry): Lacunar's own form and compressed-tensors' ``sparse-bitmask``;
- two values of every four and a bitmask (Packed24Entry): compressed-tensors' ``sparse-24-bitmask``;
- a weight and its mask (MaskedEntry): torch.nn.utils.prune.

Nothing here maps a whole file: tensors are read with plain reads into memory that the caller owns, so that
loading never holds more than what it is making.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from service.errors import CheckpointError

from .headers import TensorEntry, check_index, fault, read_header, read_json, tensor_digest, weight_files

__all__ = [
    "WEIGHT_DTYPES",
    "Checkpoint",
    "Entry",
    "MaskedEntry",
    "Packed24Entry",
    "PackedEntry",
    "TensorEntry",
    "fault",
    "matrix_shape",
]

WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Rows are converted and unpacked in pieces of about this size: small beside any layer, large beside a read.
_CHUNK_BYTES = 4 << 20
_POPCOUNT = np.array([bin(byte).count("1") for byte in range(256)], dtype=np.uint8)
# Bytes of a bitmask in which both groups of four have two bits set.
_TWO_OF_FOUR = (_POPCOUNT[np.arange(256) & 15] == 2) & (_POPCOUNT[np.arange(256) >> 4] == 2)

_PACKED_ENDINGS = (".compressed", ".bitmask", ".row_offsets", ".shape")
# Up to version 0.8.1 compressed-tensors kept the parameter's name in its keys, since then the module's.
_PARAMETER_ENDINGS = (".weight", ".bias")
_MASKED_ENDINGS = ("_orig", "_mask")

_DEQUANTISE = (
    "expected float32, bfloat16 or float16 weights. Give the checkpoint that it was quantised from, or "
    "dequantise it with the tool that wrote it and save plain safetensors"
)
# Stored forms that are recognised and refused, by the ending of a tensor's name. The order matters: the first
# ending that fits gives the sentence.
_REFUSED_FORMS: tuple[tuple[str, str], ...] = (
    (
        ".scale_packed",
        "a quantised weight (compressed-tensors marlin-24, for which there is no decompressor)",
    ),
    (".meta", "a quantised weight (compressed-tensors marlin-24, for which there is no decompressor)"),
    (".weight_packed", "a quantised weight (compressed-tensors pack-quantized or marlin-24)"),
    (".qweight", "a quantised weight (GPTQ or AWQ)"),
    (".qzeros", "a quantised weight (GPTQ or AWQ)"),
    (".weight_scale", "a quantised weight (compressed-tensors)"),
    (".weight_scale_inv", "a quantised weight (block-wise fp8)"),
    (".weight.absmax", "a quantised weight (bitsandbytes)"),
    (".SCB", "a quantised weight (bitsandbytes)"),
)


@dataclass(frozen=True, slots=True)
class PackedEntry:
    """A matrix ``[N, K]`` (or a vector, as one row) stored as a bitmask and its non-zeros.

    Attributes:
        name: the name that the dense tensor would have, ``<module>.weight``.
        values: ``<module>.compressed``, 1-D, the non-zeros in row-major order.
        bitmask: ``<module>.bitmask``, uint8 ``[N, ceil(K / 8)]``, least significant bit first.
        row_offsets: ``<module>.row_offsets``, int64 ``[N]``, index of each row's first value.
        sizes: ``<module>.shape``, int64 ``[2]``: N, K.

    Source: compressed-tensors 0.9.4, ``sparse-bitmask``; Lacunar's own packed form is the same.
    """

    name: str
    shape: tuple[int, ...]
    values: TensorEntry
    bitmask: TensorEntry
    row_offsets: TensorEntry
    sizes: TensorEntry

    @property
    def dtype(self) -> torch.dtype:
        """The values' dtype."""
        return self.values.dtype

    @property
    def file(self) -> Path:
        """The file that holds the values."""
        return self.values.file

    @property
    def parts(self) -> tuple[TensorEntry, ...]:
        """The stored tensors that make it up."""
        return self.values, self.bitmask, self.row_offsets, self.sizes

    @property
    def nnz(self) -> int:
        """How many values are stored."""
        return self.values.shape[0]


@dataclass(frozen=True, slots=True)
class Packed24Entry:
    """A matrix ``[N, K]`` of which two in every four values of a row are stored, explicit zeros among them.

    Attributes:
        name: the name that the dense tensor would have.
        values: ``<module>.compressed``, ``[N, K / 2]``.
        bitmask: ``<module>.bitmask``, uint8 ``[N, ceil(K / 8)]``, least significant bit first.
        sizes: ``<module>.shape``, int64 ``[2, 1]``: N, K.

    Source: compressed-tensors 0.9.4 to 0.14.0.1, ``sparse-24-bitmask``.
    """

    name: str
    shape: tuple[int, ...]
    values: TensorEntry
    bitmask: TensorEntry
    sizes: TensorEntry

    @property
    def dtype(self) -> torch.dtype:
        """The values' dtype."""
        return self.values.dtype

    @property
    def file(self) -> Path:
        """The file that holds the values."""
        return self.values.file

    @property
    def parts(self) -> tuple[TensorEntry, ...]:
        """The stored tensors that make it up."""
        return self.values, self.bitmask, self.sizes


@dataclass(frozen=True, slots=True)
class MaskedEntry:
    """A tensor that torch.nn.utils.prune stores as ``<name>_orig`` and ``<name>_mask`` of ones and zeros.

    Its values are the originals where the mask is one and +0 elsewhere. (torch multiplies the two, which
    leaves -0 for negative and NaN for infinite originals; zeros are meant.)
    """

    name: str
    original: TensorEntry
    mask: TensorEntry

    @property
    def shape(self) -> tuple[int, ...]:
        """The dense tensor's shape."""
        return self.original.shape

    @property
    def dtype(self) -> torch.dtype:
        """The original's dtype."""
        return self.original.dtype

    @property
    def file(self) -> Path:
        """The file that holds the original."""
        return self.original.file

    @property
    def parts(self) -> tuple[TensorEntry, ...]:
        """The stored tensors that make it up."""
        return self.original, self.mask


Entry = TensorEntry | PackedEntry | Packed24Entry | MaskedEntry


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns when every dimension but the last counts rows; a vector is one row."""
    if not shape:
        return 1, 1
    return math.prod(shape[:-1]), shape[-1]


@dataclass
class Checkpoint:
    """An open checkpoint directory. Use it as a context manager; it holds one descriptor per file.

    Where a file's metadata has digests (Lacunar writes them), a tensor that is read from end to end is
    compared with its digest, whoever reads it: a flipped bit in a value is an error, not another value.

    Attributes:
        path: the directory.
        config: config.json as parsed.
        entries: every stored tensor by the name it has when dense.
        refusal: why no such checkpoint is served (it is quantised), or None; see `open`.
    """

    path: Path
    config: dict[str, Any]
    entries: Mapping[str, Entry]
    refusal: str | None = None
    _files: dict[Path, FileIO] = field(default_factory=dict, repr=False)
    # Of tensors with a digest: the hash of what was read so far and where it ends; None once it was right.
    _hashes: dict[str, tuple[Any, int] | None] = field(default_factory=dict, repr=False)

    @classmethod
    def open(cls, path: str | Path, *, allow_refused: bool = False) -> Self:
        """Read config.json and all headers, and check them against each other and the files' sizes.

        Args:
            path: the directory.
            allow_refused: open a quantised checkpoint all the same, with `refusal` set: to look at it.

        Raises:
            CheckpointError: the directory, a file, a header or the stored form is not what can be served.
        """
        root = Path(path)
        try:
            return cls._open(root, allow_refused)
        except OSError as error:
            raise fault(Path(error.filename or root), None, "a readable file", str(error.strerror)) from error

    @classmethod
    def _open(cls, root: Path, allow_refused: bool) -> Self:
        if not root.is_dir():
            found = "a file" if root.exists() else "nothing"
            hint = "GGUF is read by `lacunar demo` only; convert it first" if root.suffix == ".gguf" else ""
            raise fault(root, None, "a directory with config.json and safetensors files", found, hint)
        config = read_json(root / "config.json", "the model's configuration")
        plain: dict[str, TensorEntry] = {}
        for file in weight_files(root):
            for entry in read_header(file):
                if entry.name in plain:
                    raise fault(
                        file,
                        entry.name,
                        "each tensor in one file",
                        f"it in {plain[entry.name].file.name} as well",
                    )
                plain[entry.name] = entry
        check_index(root, plain)
        refusal = _quantised(root / "config.json", config) or _refused_form(plain)
        if refusal is not None and not allow_refused:
            raise CheckpointError(refusal)
        checkpoint = cls(path=root, config=config, entries={}, refusal=refusal)
        try:
            checkpoint.entries = plain if refusal is not None else _group(checkpoint, plain)
        except BaseException:
            checkpoint.close()
            raise
        return checkpoint

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    @property
    def config_file(self) -> Path:
        """Where the configuration lies, for messages."""
        return self.path / "config.json"

    def nbytes(self, entry: Entry) -> int:
        """Bytes that the entry takes on disk."""
        return sum(part.nbytes for part in entry.parts)

    def find(self, name: str, shape: tuple[int, ...]) -> Entry:
        """Return the entry of a floating-point tensor after checking its shape and dtype.

        Raises:
            CheckpointError: it is missing, or not of this shape, or not float32, bfloat16 or float16.
        """
        entry = self.entries.get(name)
        if entry is None:
            raise fault(
                self.path, name, f"a tensor of shape {list(shape)}", "none", _nearest(name, self.entries)
            )
        if entry.shape != shape:
            raise fault(
                entry.file,
                name,
                f"shape {list(shape)} (from {self.config_file.name})",
                f"shape {list(entry.shape)}",
            )
        if entry.dtype not in WEIGHT_DTYPES:
            raise fault(
                entry.file,
                name,
                "dtype float32, bfloat16 or float16",
                str(entry.dtype).removeprefix("torch."),
                "quantised and integer weights are not served",
            )
        return entry

    def read_into(self, entry: Entry, out: Tensor) -> None:
        """Read a tensor into ``out`` (contiguous, CPU, same number of elements), converting to its dtype.

        Raises:
            CheckpointError: the file is shorter than its header says, a packed entry is inconsistent, or a
                finite value is outside the range of ``out``'s dtype.
        """
        flat = out.view(-1)
        if isinstance(entry, TensorEntry) and entry.dtype == out.dtype:
            self._read_raw(entry, 0, flat)
            return
        columns = matrix_shape(entry.shape)[1]
        for first, rows in self.rows(entry, out.dtype):
            flat[first * columns : first * columns + rows.numel()].copy_(rows.view(-1))

    def rows(self, entry: Entry, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
        """Yield ``(first_row, rows [r, K])`` in order, a few megabytes at a time, in ``dtype``.

        The tensor is overwritten by the next iteration. Raises as `read_into`.
        """
        N, K = matrix_shape(entry.shape)
        step = max(1, _CHUNK_BYTES // max(1, K * 4))
        if isinstance(entry, MaskedEntry):
            yield from self._masked_rows(entry, dtype, step)
            return
        if isinstance(entry, (PackedEntry, Packed24Entry)):
            yield from self._packed_rows(entry, dtype, step)
            return
        raw = torch.empty((min(step, N), K), dtype=entry.dtype)
        for first in range(0, N, step):
            rows = raw[: min(step, N - first)]
            self._read_raw(entry, first * K, rows.view(-1))
            yield first, _convert(entry, rows, dtype)

    def read_packed_into(self, entry: PackedEntry, bitmap: Tensor, values: Tensor) -> Tensor:
        """Read a packed matrix as it is, checking that bitmask, offsets and values agree.

        Args:
            entry: what to read.
            bitmap: ``[N, ceil(K / 8)]`` uint8, contiguous; written.
            values: ``[nnz]``, contiguous, any weight dtype; written.

        Returns:
            ``[N]`` int64, the number of values in each row.

        Raises:
            CheckpointError: as `read_into`.
        """
        counts = self._row_counts(entry)
        N, _ = matrix_shape(entry.shape)
        step = max(1, _CHUNK_BYTES // max(1, bitmap.shape[1]))
        width = bitmap.shape[1]
        for first in range(0, N, step):
            piece = bitmap[first : first + step]
            self._read_raw(entry.bitmask, first * width, piece.view(-1))
            _check_bitmask(entry, first, piece, counts)
        if entry.dtype == values.dtype:
            self._read_raw(entry.values, 0, values)
            return counts
        for start in range(0, entry.nnz, _CHUNK_BYTES // 4):
            raw = torch.empty(min(_CHUNK_BYTES // 4, entry.nnz - start), dtype=entry.dtype)
            self._read_raw(entry.values, start, raw)
            values[start : start + raw.numel()].copy_(_convert(entry, raw, values.dtype))
        return counts

    def read_small(self, entry: TensorEntry) -> Tensor:
        """Read a tensor whole in its stored dtype: offsets, shapes and the like."""
        out = torch.empty(entry.shape, dtype=entry.dtype)
        self._read_raw(entry, 0, out.view(-1))
        return out

    def read(self, entry: Entry) -> Tensor:
        """Read a tensor whole and dense, in its stored dtype. Raises as `read_into`."""
        if isinstance(entry, TensorEntry):
            return self.read_small(entry)
        out = torch.empty(entry.shape, dtype=entry.dtype)
        self.read_into(entry, out)
        return out

    def _packed_rows(
        self, entry: PackedEntry | Packed24Entry, dtype: torch.dtype, step: int
    ) -> Iterator[tuple[int, Tensor]]:
        N, K = matrix_shape(entry.shape)
        width = -(-K // 8)
        if isinstance(entry, PackedEntry):
            counts = self._row_counts(entry)
        else:
            counts = torch.full((N,), K // 2, dtype=torch.int64)
        starts = torch.cat((counts.new_zeros(1), counts.cumsum(0))).tolist()
        for first in range(0, N, step):
            last = min(first + step, N)
            bitmap = torch.empty((last - first, width), dtype=torch.uint8)
            self._read_raw(entry.bitmask, first * width, bitmap.view(-1))
            _check_bitmask(entry, first, bitmap, counts)
            values = torch.empty(starts[last] - starts[first], dtype=entry.dtype)
            self._read_raw(entry.values, starts[first], values)
            mask = np.unpackbits(bitmap.numpy(), axis=1, count=K, bitorder="little").view(np.bool_)
            rows = torch.zeros((last - first, K), dtype=dtype)
            rows.masked_scatter_(torch.from_numpy(mask), _convert(entry, values, dtype))
            yield first, rows

    def _masked_rows(self, entry: MaskedEntry, dtype: torch.dtype, step: int) -> Iterator[tuple[int, Tensor]]:
        N, K = matrix_shape(entry.shape)
        raw = torch.empty((min(step, N), K), dtype=entry.dtype)
        raw_mask = torch.empty((min(step, N), K), dtype=entry.mask.dtype)
        for first in range(0, N, step):
            count = min(step, N - first)
            rows, mask = raw[:count], raw_mask[:count]
            self._read_raw(entry.original, first * K, rows.view(-1))
            self._read_raw(entry.mask, first * K, mask.view(-1))
            odd = (mask != 0) & (mask != 1)
            if bool(odd.any()):
                row, column = torch.nonzero(odd)[0].tolist()
                raise fault(
                    entry.mask.file,
                    entry.mask.name,
                    "a mask of zeros and ones",
                    f"{float(mask[row, column]):g} in row {first + row}, column {column}",
                )
            yield first, _convert(entry, rows.masked_fill_(mask == 0, 0.0), dtype)

    def _row_counts(self, entry: PackedEntry) -> Tensor:
        """Values per row from the row offsets, after checking them against the number of values."""
        starts = self.read_small(entry.row_offsets).view(-1)
        ends = torch.cat((starts[1:], starts.new_tensor([entry.nnz])))
        counts = ends - starts
        if starts.numel() and int(starts[0]) != 0:
            raise fault(
                entry.row_offsets.file,
                entry.row_offsets.name,
                "row 0 to start at value 0",
                f"{int(starts[0])}",
            )
        bad = torch.nonzero((counts < 0) | (ends > entry.nnz))
        if bad.numel():
            row = int(bad[0])
            raise fault(
                entry.row_offsets.file,
                entry.row_offsets.name,
                f"offsets that never fall and end within the {entry.nnz} values of {entry.values.name}",
                f"row {row} from {int(starts[row])} to {int(ends[row])}",
            )
        return counts

    def _read_raw(self, entry: TensorEntry, start: int, out: Tensor) -> None:
        """Fill the 1-D ``out`` with elements ``start:`` of the stored tensor, in its stored dtype."""
        if out.numel() == 0:
            return
        view = out.view(torch.uint8).numpy().data
        done = 0
        try:
            file = self._files.get(entry.file)
            if file is None:
                file = self._files[entry.file] = entry.file.open("rb", buffering=0)
            file.seek(entry.offset + start * entry.dtype.itemsize)
            while done < len(view):
                got = file.readinto(view[done:])
                if not got:
                    raise fault(
                        entry.file,
                        entry.name,
                        f"{len(view)} bytes at byte {entry.offset}",
                        f"{done}: the file is truncated",
                    )
                done += got
        except OSError as error:
            raise fault(entry.file, entry.name, "a readable file", str(error.strerror)) from error
        if entry.digest:
            self._compare_digest(entry, start * entry.dtype.itemsize, view)

    def _compare_digest(self, entry: TensorEntry, start: int, view: memoryview) -> None:
        """Go on with the hash of a tensor that is read in order; at its end compare it with the digest."""
        if start == 0 and entry.name not in self._hashes:
            self._hashes[entry.name] = tensor_digest(entry.name, entry.dtype, entry.shape), 0
        state = self._hashes.get(entry.name)
        if state is None or state[1] != start:
            return
        digest, position = state[0], start + len(view)
        digest.update(view)
        self._hashes[entry.name] = digest, position
        if position == entry.nbytes:
            if digest.hexdigest() != entry.digest:
                raise fault(
                    entry.file,
                    entry.name,
                    f"the contents that were written (SHA-256 {entry.digest[:16]}...)",
                    f"others ({digest.hexdigest()[:16]}...)",
                    "the file is damaged; copy or make it again",
                )
            self._hashes[entry.name] = None


def _convert(entry: Entry, source: Tensor, dtype: torch.dtype) -> Tensor:
    """``source`` in ``dtype``; a finite value that would become infinite is an error."""
    if source.dtype == dtype:
        return source
    out = source.to(dtype)
    if dtype == torch.float16:
        lost = torch.isinf(out) & torch.isfinite(source)
        if bool(lost.any()):
            raise fault(
                entry.file,
                entry.name,
                "values within float16's range (+-65504)",
                f"{float(source[lost][0]):g}",
                "load with dtype bfloat16 or float32",
            )
    return out


def _check_bitmask(entry: PackedEntry | Packed24Entry, first: int, bitmap: Tensor, counts: Tensor) -> None:
    """Compare rows of a bitmask with the values that the row offsets, or two in every four, give them."""
    K = matrix_shape(entry.shape)[1]
    bits = bitmap.numpy()
    if isinstance(entry, Packed24Entry):
        _check_two_of_four(entry, first, bits)
        return
    set_bits = _POPCOUNT[bits].sum(axis=1, dtype=np.int64)
    wanted = counts[first : first + bits.shape[0]].numpy()
    wrong = np.flatnonzero(set_bits != wanted)
    if wrong.size:
        row = int(wrong[0])
        raise fault(
            entry.bitmask.file,
            entry.bitmask.name,
            f"{int(wanted[row])} bits set in row {first + row} (from {entry.row_offsets.name} and the length "
            f"of {entry.values.name})",
            f"{int(set_bits[row])}",
        )
    if K % 8 and np.any(bits[:, -1] >> (K % 8)):
        row = int(np.flatnonzero(bits[:, -1] >> (K % 8))[0])
        raise fault(
            entry.bitmask.file,
            entry.bitmask.name,
            f"no bit set past column {K - 1}",
            f"one in row {first + row}",
        )


def _check_two_of_four(entry: Packed24Entry, first: int, bits: Any) -> None:
    K = entry.shape[1]
    sound = _TWO_OF_FOUR[bits]
    if K % 8:
        # The last byte holds one group; its other half is padding.
        sound[:, -1] = (_POPCOUNT[bits[:, -1] & 15] == 2) & (bits[:, -1] < 16)
    if not sound.all():
        row, byte = (int(index[0]) for index in np.nonzero(~sound))
        raise fault(
            entry.bitmask.file,
            entry.bitmask.name,
            "two bits set in every group of four columns",
            f"byte {byte} of row {first + row} is {int(bits[row, byte]):#010b}",
        )


def _group(checkpoint: Checkpoint, plain: dict[str, TensorEntry]) -> dict[str, Entry]:
    """Gather the tensors that belong together into one entry under the dense tensor's name."""
    entries: dict[str, Entry] = dict(plain)

    def replace(entry: PackedEntry | Packed24Entry | MaskedEntry) -> None:
        for part in entry.parts:
            del entries[part.name]
        if entry.name in entries:
            clash = entries[entry.name]
            raise fault(
                clash.file, entry.name, "one form of each weight", f"it dense and as {entry.parts[0].name}"
            )
        entries[entry.name] = entry

    for stem in _stems(plain, (".compressed", ".bitmask")):
        replace(_packed_entry(checkpoint, stem, plain))
    for stem in _stems(plain, _MASKED_ENDINGS):
        if stem.endswith(_PARAMETER_ENDINGS):
            replace(_masked_entry(checkpoint, stem, plain))
    return entries


def _stems(plain: dict[str, TensorEntry], endings: tuple[str, ...]) -> list[str]:
    """What is left of the names with one of these endings, each once."""
    return sorted({name.removesuffix(end) for name in plain for end in endings if name.endswith(end)})


def _part(checkpoint: Checkpoint, name: str, whole: str, plain: dict[str, TensorEntry]) -> TensorEntry:
    entry = plain.get(name)
    if entry is None:
        raise fault(checkpoint.path, name, f"this part of {whole}", "none")
    return entry


def _check_part(
    entry: TensorEntry, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...], why: str
) -> None:
    if entry.dtype not in dtypes or entry.shape != shape:
        names = " or ".join(_name(dtype) for dtype in dtypes)
        raise fault(
            entry.file,
            entry.name,
            f"{names} {list(shape)} ({why})",
            f"{_name(entry.dtype)} {list(entry.shape)}",
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _packed_entry(
    checkpoint: Checkpoint, stem: str, plain: dict[str, TensorEntry]
) -> PackedEntry | Packed24Entry:
    whole = f"the packed weight {stem}"
    values, bitmask, sizes = (
        _part(checkpoint, stem + end, whole, plain) for end in (".compressed", ".bitmask", ".shape")
    )
    name = stem if stem.endswith(_PARAMETER_ENDINGS) else f"{stem}.weight"
    # 8-bit values are known and laid out the same; `find` refuses them where they would be served.
    if values.dtype not in (*WEIGHT_DTYPES, torch.float8_e4m3fn, torch.float8_e5m2):
        raise fault(values.file, values.name, "values of 8, 16 or 32 bits", _name(values.dtype))
    two_of_four = len(values.shape) == 2 and stem + ".row_offsets" not in plain
    if sizes.dtype != torch.int64 or sizes.shape not in (((2,), (2, 1)) if two_of_four else ((2,), (1,))):
        raise fault(sizes.file, sizes.name, "int64 [2]", f"{_name(sizes.dtype)} {list(sizes.shape)}")
    shape = tuple(checkpoint.read_small(sizes).view(-1).tolist())
    # The bitmask's own shape bounds these sizes below, before memory is asked for.
    if any(size < 0 for size in shape):
        raise fault(sizes.file, sizes.name, "sizes of at least 0", str(list(shape)))
    width = -(-shape[-1] // 8)
    _check_part(bitmask, (torch.uint8,), (*shape[:-1], width), f"one bit an element of {list(shape)}")
    if two_of_four:
        if shape[1] % 4:
            raise fault(sizes.file, sizes.name, "columns in groups of four", str(shape[1]))
        half = (shape[0], shape[1] // 2)
        _check_part(values, (values.dtype,), half, f"two values of every four of {list(shape)}")
        return Packed24Entry(name, shape, values, bitmask, sizes)
    offsets = _part(checkpoint, stem + ".row_offsets", whole, plain)
    length = values.shape[0] if values.shape else 0
    _check_part(values, (values.dtype,), (length,), "the non-zeros in row order")
    _check_part(offsets, (torch.int64,), shape[:-1], f"one offset a row of {list(shape)}")
    return PackedEntry(name, shape, values, bitmask, offsets, sizes)


def _masked_entry(checkpoint: Checkpoint, stem: str, plain: dict[str, TensorEntry]) -> MaskedEntry:
    original, mask = (
        _part(checkpoint, stem + end, f"the masked tensor {stem}", plain) for end in _MASKED_ENDINGS
    )
    masks = (torch.bool, torch.uint8, *WEIGHT_DTYPES)
    _check_part(mask, masks, original.shape, f"a mask for {original.name}")
    return MaskedEntry(stem, original, mask)


def _refused_form(plain: dict[str, TensorEntry]) -> str | None:
    """The sentence about the first tensor of a form that is not read, or None."""
    marlin = any(name.endswith(".scale_packed") for name in plain)
    for ending, form in _REFUSED_FORMS:
        if ending == ".meta" and not marlin:
            continue
        for name, entry in plain.items():
            if name.endswith(ending):
                return f"{entry.file}: tensor {name} belongs to {form}; {_DEQUANTISE}."
    return None


def _quantised(file: Path, config: dict[str, Any]) -> str | None:
    """Say that the configuration calls it quantised. A claim of sparsity is not trusted: keys decide."""
    for key in ("quantization_config", "compression_config"):
        claim = config.get(key)
        if claim is None:
            continue
        if not isinstance(claim, dict):
            raise fault(file, None, f"an object under {key}", type(claim).__name__)
        method = claim.get("quant_method", "compressed-tensors")
        if method == "lacunar":
            version, form = claim.get("format_version"), claim.get("format")
            if version != 1 or form != "bitmask":
                raise fault(
                    file,
                    None,
                    "the packed form 'bitmask', version 1",
                    f"{form!r}, version {version!r}",
                    "it was written by a newer Lacunar; update this one",
                )
        elif method != "compressed-tensors":
            return f"{file}: {key} says that the weights are quantised ({method}), {_DEQUANTISE}."
        elif claim.get("config_groups"):
            form = claim.get("format", "")
            what = f"compressed-tensors {form}"
            return f"{file}: {key} says that the weights are quantised ({what}), {_DEQUANTISE}."
    return None


def _nearest(name: str, entries: Mapping[str, Entry]) -> str:
    """A hint that names a stored tensor whose name ends alike, to show a wrong prefix."""
    tail = ".".join(name.split(".")[-3:])
    numbered = re.compile(rf"(^|\.){re.escape(tail)}$")
    close = [other for other in entries if numbered.search(other)]
    return f"The checkpoint has {close[0]}" if close else f"The checkpoint has {len(entries)} tensors"
