"""Model directories: read tensor by tensor, write shard by shard, appear complete or not at all.

A reader sees one name per weight, `<module>.weight`, whether the file holds it dense or packed
(kernels_ext/formats/BITMAP.md). Neither reading nor writing ever holds more than one tensor.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kernels_ext import BitmapWeight, bitmap_unpack
from service.errors import CheckpointError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
QUANT_METHOD = "lacunar"
FORMAT_VERSION = 1
PACKED_SUFFIXES = (".compressed", ".bitmask", ".row_offsets", ".shape")

# Weights in any form; everything else in a model directory belongs to the config or the tokenizer.
_WEIGHT_SUFFIXES = {
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".gguf",
    ".h5",
    ".msgpack",
    ".onnx",
    ".npz",
}

# safetensors' names of types; a file that holds another one cannot be rewritten without loss.
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True)
class TensorEntry:
    """A tensor that can be read when its turn comes to be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    load: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize


class SafetensorsFile:
    """One file, opened by memory map; a damaged one is an error that names it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file: Any = safe_open(path, framework="pt", device="cpu")
            self.entries = self._entries()
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}: cannot be read as safetensors: {error}") from error

    def _entries(self) -> dict[str, TensorEntry]:
        return {name: self._entry(name) for name in self._file.keys()}  # noqa: SIM118

    def _entry(self, name: str) -> TensorEntry:
        view = self._file.get_slice(name)
        dtype = _DTYPES.get(view.get_dtype())
        if dtype is None:
            raise CheckpointError(
                f"{self.path}: tensor {name} has type {view.get_dtype()}, which is not supported here"
            )
        return TensorEntry(name, dtype, tuple(view.get_shape()), lambda: self._file.get_tensor(name))


class Checkpoint:
    """A Hugging Face model directory with safetensors, dense or packed.

    Attributes:
        path: the directory.
        config: its config.json.
        shards: file name -> the names stored there, each weight under `<module>.weight`.
        packed_modules: modules whose weight lies packed.

    Raises:
        CheckpointError: no config, no safetensors, an index that disagrees with its files, a quantised model,
            or a packed weight of which a part is missing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = _read_json(path / "config.json")
        quantization = self.config.get("quantization_config")
        self._is_packed = quantization is not None
        if quantization is not None:
            method, version = quantization.get("quant_method"), quantization.get("format_version")
            if method != QUANT_METHOD:
                raise CheckpointError(
                    f"{path / 'config.json'}: quant_method is {method!r}; give the model it was made from, "
                    "with float32, bfloat16 or float16 weights"
                )
            if version != FORMAT_VERSION:
                raise CheckpointError(
                    f"{path / 'config.json'}: format_version is {version!r}, this version of Lacunar reads "
                    f"{FORMAT_VERSION}"
                )
        self._stored: dict[str, TensorEntry] = {}
        self.shards: dict[str, list[str]] = {}
        packed: set[str] = set()
        for file, names in self._files().items():
            entries = SafetensorsFile(path / file).entries
            if names is not None and names != entries.keys():
                odd = sorted(names ^ entries.keys())[0]
                where = "the index but not the file" if odd in names else "the file but not the index"
                raise CheckpointError(f"{path / file}: tensor {odd} is in {where}")
            self._stored |= entries
            self.shards[file] = []
            for name in entries:
                module, _, suffix = name.rpartition(".")
                if not self._is_packed or f".{suffix}" not in PACKED_SUFFIXES:
                    self.shards[file].append(name)
                    continue
                packed.add(module)
                if suffix == "compressed":
                    self.shards[file].append(f"{module}.weight")
        self.packed_modules = frozenset(packed)
        for module in sorted(packed):
            for suffix in PACKED_SUFFIXES:
                if module + suffix not in self._stored:
                    raise CheckpointError(f"{path}: {module} is packed, but {module + suffix} is missing")

    def _files(self) -> dict[str, set[str] | None]:
        """File name -> the names its index gives, or None where there is no index."""
        index = self.path / INDEX_FILE
        if index.exists():
            files: dict[str, set[str]] = {}
            for name, file in _read_json(index).get("weight_map", {}).items():
                if Path(file).name != file:
                    raise CheckpointError(f"{index}: {name} lies in {file!r}, which is not a plain file name")
                files.setdefault(file, set()).add(name)
            return dict(sorted(files.items()))
        if (self.path / SINGLE_FILE).exists():
            return {SINGLE_FILE: None}
        raise CheckpointError(
            f"{self.path}: has neither {INDEX_FILE} nor {SINGLE_FILE}; only safetensors can be read "
            "(transformers' save_pretrained writes them)"
        )

    def __contains__(self, name: str) -> bool:
        return name in self._stored or name.removesuffix(".weight") in self.packed_modules

    def stored(self, name: str) -> list[TensorEntry]:
        """The tensors that hold `name` on disk: itself, or the four of a packed weight."""
        module = name.removesuffix(".weight")
        if module in self.packed_modules:
            return [self._stored[module + suffix] for suffix in PACKED_SUFFIXES]
        return [self._stored[name]]

    def entry(self, name: str) -> TensorEntry:
        """`name` as a dense tensor, read (and unpacked) when loaded."""
        module = name.removesuffix(".weight")
        if module in self.packed_modules:
            values = self._stored[module + ".compressed"]
            shape = self._stored[module + ".shape"].load().tolist()
            return TensorEntry(name, values.dtype, tuple(shape), lambda: bitmap_unpack(self.packed(module)))
        if name not in self._stored:
            raise CheckpointError(f"{self.path}: tensor {name} is missing")
        return self._stored[name]

    def packed(self, module: str) -> BitmapWeight:
        """The packed weight of `module`, validated."""
        values, bitmap, row_offsets, shape = (
            self._stored[module + suffix].load() for suffix in PACKED_SUFFIXES
        )
        try:
            N, K = shape.tolist()
            offsets = torch.cat([row_offsets, torch.tensor([values.numel()], dtype=row_offsets.dtype)])
            weight = BitmapWeight(N=N, K=K, bitmap=bitmap, values=values, row_offsets=offsets)
            weight.validate()
        except (TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"{self.path}: packed weight {module}: {error}") from error
        return weight


def packed_entries(module: str, weight: BitmapWeight) -> list[TensorEntry]:
    """The four tensors of a packed weight, as they lie on disk."""
    parts = {
        ".compressed": weight.values,
        ".bitmask": weight.bitmap,
        ".row_offsets": weight.row_offsets[:-1],
        ".shape": torch.tensor([weight.N, weight.K], dtype=torch.int64),
    }
    return [tensor_entry(module + suffix, tensor) for suffix, tensor in parts.items()]


def tensor_entry(name: str, tensor: Tensor) -> TensorEntry:
    """An entry whose tensor is already in memory."""
    return TensorEntry(name, tensor.dtype, tuple(tensor.shape), lambda: tensor)


def write_safetensors(file: Path, entries: Iterable[TensorEntry]) -> int:
    """Write a safetensors file, loading one tensor at a time; returns the bytes of the tensors.

    The widest types come first, as the reference writer orders them, so that each tensor is aligned.
    """
    ordered = sorted(entries, key=lambda entry: (-entry.dtype.itemsize, entry.name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in ordered:
        header[entry.name] = {
            "dtype": _DTYPE_NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [offset, offset + entry.nbytes],
        }
        offset += entry.nbytes
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with file.open("wb") as stream:
        stream.write(len(encoded).to_bytes(8, "little"))
        stream.write(encoded)
        for entry in ordered:
            tensor = entry.load()
            assert tensor.dtype == entry.dtype and tuple(tensor.shape) == entry.shape, entry.name  # noqa: PT018
            stream.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return offset


def write_checkpoint(
    source: Checkpoint,
    directory: Path,
    entries_of: Callable[[str], list[TensorEntry]],
    progress: Callable[[float], None],
) -> None:
    """Write `source` anew into `directory`: same shards, config and side files, other tensors.

    Args:
        source: what to copy.
        directory: an existing empty directory.
        entries_of: what to store for each name of `source.shards`; called once for each.
        progress: called with the share of the shards that is written.
    """
    copy_side_files(source.path, directory)
    weight_map: dict[str, str] = {}
    total_bytes = 0
    for done, (file, names) in enumerate(source.shards.items()):
        progress(done / len(source.shards))
        entries = [entry for name in names for entry in entries_of(name)]
        total_bytes += write_safetensors(directory / file, entries)
        weight_map |= {entry.name: file for entry in entries}
    if list(source.shards) != [SINGLE_FILE]:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        write_json(directory / INDEX_FILE, index)
    config = {key: value for key, value in source.config.items() if key != "quantization_config"}
    if any(name.endswith(".bitmask") for name in weight_map):
        config["quantization_config"] = {
            "quant_method": QUANT_METHOD,
            "format_version": FORMAT_VERSION,
            "format": "bitmask",
        }
    write_json(directory / "config.json", config)
    progress(1.0)


def copy_side_files(source: Path, directory: Path) -> None:
    """Copy tokenizer, templates, generation config, licence: every plain file but weights, index and config.

    Links are followed: in a Hugging Face cache every file is one.
    """
    for file in sorted(source.iterdir()):
        is_weight = file.suffix in _WEIGHT_SUFFIXES or file.name.endswith(".index.json")
        if file.is_file() and not is_weight and file.name != "config.json":
            shutil.copyfile(file, directory / file.name)


@contextmanager
def new_directory(out: Path) -> Iterator[Path]:
    """Give a temporary directory beside `out` that takes its name when the block ends well.

    On any error, an interrupt included, the temporary directory is removed and `out` does not appear.

    Raises:
        FileExistsError: `out` exists, before or after the block.
    """
    refuse_existing(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.parent / f".{out.name}.{secrets.token_hex(4)}.partial"
    temporary.mkdir()
    try:
        yield temporary
        refuse_existing(out)
        temporary.rename(out)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def refuse_existing(out: Path) -> None:
    """Raise FileExistsError when `out` exists; nothing here overwrites a model."""
    if os.path.lexists(out):
        raise FileExistsError(f"{out} exists; remove it or name another output directory")


def write_json(file: Path, value: Mapping[str, Any]) -> None:
    """Write indented JSON with a final newline."""
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{file}: is missing") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: expected a JSON object, found {type(value).__name__}")
    return value
