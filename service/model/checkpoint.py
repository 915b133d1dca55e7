"""Read a Hugging Face checkpoint directory: safetensors only, one tensor at a time, every claim checked.

Two stored forms are read: plain tensors (sparse ones hold explicit zeros), and the portable packed form, in
which ``<module>.weight`` is replaced by ``<module>.bitmask`` and ``<module>.compressed`` (see PackedEntry).
Nothing here maps a whole file: tensors are read with plain reads into memory that the caller owns, so that
loading never holds more than what it is making.
"""

from __future__ import annotations

import json
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

WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Tags of the safetensors format. Tags with no torch dtype here cannot be part of a checkpoint that is served.
_DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
# The limit that the safetensors format sets on its header.
_MAX_HEADER_BYTES = 100_000_000
# Rows are converted and unpacked in pieces of about this size: small beside any layer, large beside a read.
_CHUNK_BYTES = 4 << 20
_POPCOUNT = np.array([bin(byte).count("1") for byte in range(256)], dtype=np.uint8)

# Stored forms that are recognised and refused, by the ending of a tensor's name. The order matters: the first
# ending that fits gives the sentence.
_REFUSED_FORMS: tuple[tuple[str, str], ...] = (
    (".weight.bitmask", "the bitmask form of compressed-tensors <= 0.8.1 (keys under <module>.weight.)"),
    (".bias.bitmask", "the bitmask form of compressed-tensors <= 0.8.1 (keys under <module>.bias.)"),
    (".weight_packed", "a quantised weight (compressed-tensors pack-quantized or marlin-24)"),
    (".scale_packed", "a quantised weight (marlin-24)"),
    (".qweight", "a quantised weight (GPTQ or AWQ)"),
    (".qzeros", "a quantised weight (GPTQ or AWQ)"),
    (".weight_scale", "a quantised weight (compressed-tensors)"),
    (".weight_scale_inv", "a quantised weight (block-wise fp8)"),
    (".weight.absmax", "a quantised weight (bitsandbytes)"),
    (".SCB", "a quantised weight (bitsandbytes)"),
    (".weight_orig", "a weight with a separate mask (torch.nn.utils.prune)"),
    (".weight_mask", "a weight with a separate mask (torch.nn.utils.prune)"),
)


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A plain tensor: where its bytes lie and what the file's header says of them."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class PackedEntry:
    """A matrix ``[N, K]`` (or a vector, as one row) stored as a bitmask and its non-zeros.

    Attributes:
        name: the name that the dense tensor would have, ``<module>.weight``.
        values: ``<module>.compressed``, 1-D, the non-zeros in row-major order.
        bitmask: ``<module>.bitmask``, uint8 ``[N, ceil(K / 8)]``, least significant bit first.
        row_offsets: ``<module>.row_offsets``, int64 ``[N]``, index of each row's first value.

    Source: compressed-tensors 0.9.4, ``sparse-bitmask``; Lacunar's own packed form is the same.
    """

    name: str
    shape: tuple[int, ...]
    values: TensorEntry
    bitmask: TensorEntry
    row_offsets: TensorEntry

    @property
    def dtype(self) -> torch.dtype:
        """The values' dtype."""
        return self.values.dtype

    @property
    def file(self) -> Path:
        """The file that holds the values."""
        return self.values.file

    @property
    def nnz(self) -> int:
        """How many values are stored."""
        return self.values.shape[0]


Entry = TensorEntry | PackedEntry


def fault(file: Path, tensor: str | None, expected: str, found: str, hint: str = "") -> CheckpointError:
    """Make the error for one inconsistency: file, tensor, what was expected, what was found, what next."""
    where = f"{file}: tensor {tensor}" if tensor is not None else f"{file}"
    return CheckpointError(f"{where}: expected {expected}, found {found}{'. ' + hint if hint else ''}")


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns when every dimension but the last counts rows; a vector is one row."""
    if not shape:
        return 1, 1
    return math.prod(shape[:-1]), shape[-1]


@dataclass
class Checkpoint:
    """An open checkpoint directory. Use it as a context manager; it holds one descriptor per file.

    Attributes:
        path: the directory.
        config: config.json as parsed.
        entries: every stored tensor by the name it has when dense.
    """

    path: Path
    config: dict[str, Any]
    entries: Mapping[str, Entry]
    _files: dict[Path, FileIO] = field(default_factory=dict, repr=False)

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Read config.json and all headers, and check them against each other and the files' sizes.

        Raises:
            CheckpointError: the directory, a file, a header or the stored form is not what can be served.
        """
        root = Path(path)
        if not root.is_dir():
            found = "a file" if root.exists() else "nothing"
            hint = "GGUF is read by `lacunar demo` only; convert it first" if root.suffix == ".gguf" else ""
            raise fault(root, None, "a directory with config.json and safetensors files", found, hint)
        config = _read_json(root / "config.json", "the model's configuration")
        _refuse_quantised(root / "config.json", config)
        plain: dict[str, TensorEntry] = {}
        for file in _weight_files(root):
            for entry in _read_header(file):
                if entry.name in plain:
                    raise fault(
                        file,
                        entry.name,
                        "each tensor in one file",
                        f"it in {plain[entry.name].file.name} as well",
                    )
                plain[entry.name] = entry
        checkpoint = cls(path=root, config=config, entries={})
        _check_index(root, plain)
        try:
            checkpoint.entries = _group_packed(checkpoint, plain)
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
        if isinstance(entry, TensorEntry):
            return entry.nbytes
        return entry.values.nbytes + entry.bitmask.nbytes + entry.row_offsets.nbytes

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
        if isinstance(entry, PackedEntry):
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

    def _packed_rows(self, entry: PackedEntry, dtype: torch.dtype, step: int) -> Iterator[tuple[int, Tensor]]:
        N, K = matrix_shape(entry.shape)
        width = -(-K // 8)
        counts = self._row_counts(entry)
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
        file = self._files.get(entry.file)
        if file is None:
            file = self._files[entry.file] = entry.file.open("rb", buffering=0)
        view = out.view(torch.uint8).numpy().data
        file.seek(entry.offset + start * entry.dtype.itemsize)
        done = 0
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


def _check_bitmask(entry: PackedEntry, first: int, bitmap: Tensor, counts: Tensor) -> None:
    """Compare rows of a bitmask with the values that the row offsets give them."""
    K = matrix_shape(entry.shape)[1]
    bits = bitmap.numpy()
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


def _read_json(file: Path, what: str) -> dict[str, Any]:
    if not file.is_file():
        raise fault(file, None, what, "no such file")
    try:
        value = json.loads(file.read_bytes())
    except ValueError as error:
        raise fault(file, None, "JSON", f"a syntax error ({error})") from error
    if not isinstance(value, dict):
        raise fault(file, None, "a JSON object", type(value).__name__)
    return value


def _weight_files(root: Path) -> list[Path]:
    """The safetensors files that make up the model: one file, or the shards that the index names."""
    single, index = root / "model.safetensors", root / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if index.is_file():
        shards = sorted(set(_weight_map(index).values()))
        for shard in shards:
            if Path(shard).name != shard or shard in (".", ".."):
                raise fault(index, None, "names of files in this directory", repr(shard))
            if not (root / shard).is_file():
                raise fault(index, None, f"the shard {shard} beside it", "no such file")
        return [root / shard for shard in shards]
    shards_found = sorted(file.name for file in root.glob("*.safetensors"))
    if shards_found:
        raise fault(
            root,
            None,
            "model.safetensors, or model.safetensors.index.json",
            f"{', '.join(shards_found)} and no index",
        )
    others = sorted(
        file.name for file in root.iterdir() if file.suffix in (".bin", ".pt", ".pth", ".gguf", ".h5")
    )
    hint = (
        f"{', '.join(others)} is not read: pickled and other formats are never loaded. Convert to safetensors"
        if others
        else ""
    )
    raise fault(root, None, "model.safetensors, or model.safetensors.index.json", "neither", hint)


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = _read_json(index, "the index of the shards").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise fault(index, None, "a weight_map from tensor names to files", type(weight_map).__name__)
    for name, shard in weight_map.items():
        if not isinstance(shard, str):
            raise fault(index, name, "a file name", repr(shard))
    return weight_map


def _check_index(root: Path, plain: dict[str, TensorEntry]) -> None:
    """Hold the index and the shards' headers to each other."""
    index = root / "model.safetensors.index.json"
    if (root / "model.safetensors").is_file():
        return
    weight_map = _weight_map(index)
    for name, shard in weight_map.items():
        entry = plain.get(name)
        if entry is None or entry.file.name != shard:
            found = "it in no shard" if entry is None else f"it in {entry.file.name}"
            raise fault(root / shard, name, f"the tensor here (from {index.name})", found)
    for name, entry in plain.items():
        if name not in weight_map:
            raise fault(index, name, f"an entry for this tensor of {entry.file.name}", "none")


def _read_header(file: Path) -> list[TensorEntry]:
    """Parse and check one safetensors header: sizes, dtypes, and that the data covers the file exactly."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        head = stream.read(8)
        if len(head) < 8:
            raise fault(file, None, "a safetensors file", f"{size} bytes: too short for a header")
        length = int.from_bytes(head, "little")
        if length > min(_MAX_HEADER_BYTES, size - 8):
            raise fault(
                file,
                None,
                f"a safetensors header of at most {min(_MAX_HEADER_BYTES, size - 8)} bytes",
                f"a length field of {length}: the file is truncated or not safetensors",
            )
        text = stream.read(length)
    try:
        header = json.loads(text, object_pairs_hook=_unique_pairs)
    except ValueError as error:
        raise fault(file, None, "a JSON header", f"{error}") from error
    if not isinstance(header, dict):
        raise fault(file, None, "a JSON object as header", type(header).__name__)
    header.pop("__metadata__", None)
    start = 8 + length
    entries = [_parse_entry(file, name, value, start, size) for name, value in header.items()]
    position = start
    for entry in sorted(entries, key=lambda item: (item.offset, item.nbytes)):
        if entry.offset != position:
            raise fault(
                file,
                entry.name,
                f"its data to start at byte {position}",
                f"{entry.offset}: an overlap or a hole",
            )
        position += entry.nbytes
    if position != size:
        raise fault(file, None, f"{position} bytes (the end of the last tensor)", f"a file of {size} bytes")
    return entries


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} twice")
    return result


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _parse_entry(file: Path, name: str, value: object, start: int, size: int) -> TensorEntry:
    if not isinstance(value, dict):
        raise fault(file, name, "an object with dtype, shape and data_offsets", type(value).__name__)
    tag, shape, offsets = value.get("dtype"), value.get("shape"), value.get("data_offsets")
    if not isinstance(tag, str) or tag not in _DTYPES:
        raise fault(file, name, f"a dtype among {', '.join(_DTYPES)}", repr(tag))
    if not isinstance(shape, list) or not all(_is_size(n) for n in shape):
        raise fault(file, name, "a shape of non-negative integers", repr(shape))
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(n) for n in offsets):
        raise fault(file, name, "two data_offsets", repr(offsets))
    dtype = _DTYPES[tag]
    nbytes = math.prod(shape) * dtype.itemsize
    if offsets[1] - offsets[0] != nbytes:
        raise fault(
            file,
            name,
            f"{nbytes} bytes for {tag} {shape}",
            f"data_offsets that span {offsets[1] - offsets[0]}",
        )
    if start + offsets[1] > size:
        raise fault(
            file,
            name,
            f"its data to end at byte {start + offsets[1]}",
            f"a file of {size} bytes: it is truncated",
        )
    return TensorEntry(name, dtype, tuple(shape), file, start + offsets[0], nbytes)


def _group_packed(checkpoint: Checkpoint, plain: dict[str, TensorEntry]) -> dict[str, Entry]:
    """Gather the four tensors of each packed matrix into one entry under the dense tensor's name."""
    for name, entry in plain.items():
        for ending, form in _REFUSED_FORMS:
            if name.endswith(ending):
                raise CheckpointError(
                    f"{entry.file}: tensor {name} belongs to {form}, which is not read yet. "
                    "Save the model as plain safetensors with explicit zeros."
                )
    entries: dict[str, Entry] = dict(plain)
    modules = sorted(
        {
            name.removesuffix(end)
            for name in plain
            for end in (".compressed", ".bitmask")
            if name.endswith(end)
        }
    )
    for module in modules:
        packed = _packed_entry(checkpoint, module, plain)
        if packed.name in plain:
            raise fault(
                plain[packed.name].file,
                packed.name,
                "one form of each weight",
                f"it dense and as {module}.compressed",
            )
        for ending in (".compressed", ".bitmask", ".row_offsets", ".shape"):
            del entries[module + ending]
        entries[packed.name] = packed
    return entries


def _packed_entry(checkpoint: Checkpoint, module: str, plain: dict[str, TensorEntry]) -> PackedEntry:
    def part(ending: str) -> TensorEntry:
        entry = plain.get(module + ending)
        if entry is None:
            raise fault(checkpoint.path, module + ending, f"this part of the packed weight {module}", "none")
        return entry

    def check(entry: TensorEntry, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...], why: str) -> None:
        if entry.dtype not in dtypes or entry.shape != shape:
            names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            found = f"{str(entry.dtype).removeprefix('torch.')} {list(entry.shape)}"
            raise fault(entry.file, entry.name, f"{names} {list(shape)} ({why})", found)

    values, bitmask, sizes = part(".compressed"), part(".bitmask"), part(".shape")
    if values.dtype not in WEIGHT_DTYPES:
        raise fault(
            values.file,
            values.name,
            "dtype float32, bfloat16 or float16",
            str(values.dtype).removeprefix("torch."),
            "quantised values are not read yet",
        )
    if len(values.shape) == 2 and module + ".row_offsets" not in plain:
        raise CheckpointError(
            f"{values.file}: tensor {values.name} belongs to the sparse-24-bitmask form of "
            "compressed-tensors, which is not read yet. Save the model as plain safetensors with explicit "
            "zeros."
        )
    offsets = part(".row_offsets")
    if sizes.dtype != torch.int64 or len(sizes.shape) != 1 or sizes.shape[0] not in (1, 2):
        raise fault(
            sizes.file, sizes.name, "int64 [2]", f"{sizes.dtype} {list(sizes.shape)}".removeprefix("torch.")
        )
    shape = tuple(checkpoint.read_small(sizes).tolist())
    # The bitmask's own shape bounds these sizes below, before memory is asked for.
    if any(size < 0 for size in shape):
        raise fault(sizes.file, sizes.name, "sizes of at least 0", str(list(shape)))
    width = -(-shape[-1] // 8)
    check(values, WEIGHT_DTYPES, (values.shape[0],) if values.shape else (0,), "the non-zeros in row order")
    check(bitmask, (torch.uint8,), (*shape[:-1], width), f"one bit an element of {list(shape)}")
    check(offsets, (torch.int64,), shape[:-1], f"one offset a row of {list(shape)}")
    return PackedEntry(module + ".weight", shape, values, bitmask, offsets)


def _refuse_quantised(file: Path, config: dict[str, Any]) -> None:
    """Refuse what the configuration says is quantised. A claim of sparsity is not trusted: keys decide."""
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
        elif method == "compressed-tensors":
            if claim.get("config_groups"):
                raise CheckpointError(
                    f"{file}: {key} says that the weights are quantised (compressed-tensors "
                    f"{claim.get('format', '')}), expected float32, bfloat16 or float16 weights."
                )
        else:
            raise CheckpointError(
                f"{file}: {key} says that the weights are quantised ({method}), expected float32, bfloat16 "
                "or float16 weights."
            )


def _nearest(name: str, entries: Mapping[str, Entry]) -> str:
    """A hint that names a stored tensor whose name ends alike, to show a wrong prefix."""
    tail = ".".join(name.split(".")[-3:])
    numbered = re.compile(rf"(^|\.){re.escape(tail)}$")
    close = [other for other in entries if numbered.search(other)]
    return f"The checkpoint has {close[0]}" if close else f"The checkpoint has {len(entries)} tensors"
