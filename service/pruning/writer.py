"""Model directories: written shard by shard and tensor by tensor; they appear complete or not at all.

What is read comes from service.model.checkpoint, which gives one name per weight, `<module>.weight`, whatever
form a file holds it in. Writing never holds more than one tensor.
"""

from __future__ import annotations

import fcntl
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
from torch import Tensor

from kernels_ext import BitmapWeight
from service.model.checkpoint import Checkpoint, Entry, TensorEntry
from service.model.headers import DIGEST_KEY, INDEX_FILE, SINGLE_FILE, TAGS, tensor_digest

QUANT_METHOD = "lacunar"
FORMAT_VERSION = 1

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


@dataclass(frozen=True)
class PendingTensor:
    """A tensor that is made or read when its turn comes to be written."""

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


def pending(name: str, tensor: Tensor) -> PendingTensor:
    """A tensor that is already in memory."""
    return PendingTensor(name, tensor.dtype, tuple(tensor.shape), lambda: tensor)


def as_stored(checkpoint: Checkpoint, entry: Entry) -> list[PendingTensor]:
    """The tensors that hold an entry on disk, to be copied as they are."""

    def copy(part: TensorEntry) -> PendingTensor:
        return PendingTensor(part.name, part.dtype, part.shape, lambda: checkpoint.read_small(part))

    return [copy(part) for part in entry.parts]


def as_dense(checkpoint: Checkpoint, entry: Entry) -> PendingTensor:
    """An entry as one ordinary tensor, unpacked when its turn comes."""
    return PendingTensor(entry.name, entry.dtype, entry.shape, lambda: checkpoint.read(entry))


def as_packed(module: str, weight: BitmapWeight) -> list[PendingTensor]:
    """The four tensors of a packed weight, as they lie on disk."""
    parts = {
        ".compressed": weight.values,
        ".bitmask": weight.bitmap,
        ".row_offsets": weight.row_offsets[:-1],
        ".shape": torch.tensor([weight.N, weight.K], dtype=torch.int64),
    }
    return [pending(module + suffix, tensor) for suffix, tensor in parts.items()]


def write_safetensors(file: Path, tensors: Iterable[PendingTensor]) -> int:
    """Write a safetensors file, loading one tensor at a time; returns the bytes of the tensors.

    The widest types come first, as the reference writer orders them, so that each tensor is aligned. The
    metadata holds a digest of each (service.model.headers.tensor_digest), by which a reader finds damage.
    """
    ordered = sorted(tensors, key=lambda tensor: (-tensor.dtype.itemsize, tensor.name))
    digests = {tensor.name: "0" * 64 for tensor in ordered}
    header = _header(ordered, digests)
    total = 0
    with file.open("wb") as stream:
        stream.write(header)
        for entry in ordered:
            tensor = entry.load()
            assert tensor.dtype == entry.dtype and tuple(tensor.shape) == entry.shape, entry.name  # noqa: PT018
            data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
            digest = tensor_digest(entry.name, entry.dtype, entry.shape)
            digest.update(data)
            digests[entry.name] = digest.hexdigest()
            total += stream.write(data)
        # The header comes first and is as long as before: only the digests in it have changed.
        stream.seek(0)
        stream.write(_header(ordered, digests))
    return total


def _header(ordered: list[PendingTensor], digests: dict[str, str]) -> bytes:
    metadata = {"format": "pt"} | {DIGEST_KEY + name: digest for name, digest in digests.items()}
    header: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for entry in ordered:
        header[entry.name] = {
            "dtype": TAGS[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [offset, offset + entry.nbytes],
        }
        offset += entry.nbytes
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    return len(encoded).to_bytes(8, "little") + encoded


def shards(checkpoint: Checkpoint) -> dict[str, list[str]]:
    """File name -> the dense names of the tensors whose values lie there, in the order of the files."""
    files: dict[str, list[str]] = {}
    for name, entry in checkpoint.entries.items():
        files.setdefault(entry.file.name, []).append(name)
    return dict(sorted(files.items()))


def write_checkpoint(
    source: Checkpoint,
    directory: Path,
    tensors_of: Callable[[str], list[PendingTensor]],
    progress: Callable[[float], None],
) -> None:
    """Write `source` anew into `directory`: same shards, config and side files, other tensors.

    Args:
        source: what to copy.
        directory: an existing directory without a model.
        tensors_of: what to store for each name of `source.entries`; called once for each.
        progress: called with the share of the shards that is written.
    """
    copy_side_files(source.path, directory)
    weight_map: dict[str, str] = {}
    total_bytes = 0
    files = shards(source)
    for done, (file, names) in enumerate(files.items()):
        progress(done / len(files))
        tensors = [tensor for name in names for tensor in tensors_of(name)]
        total_bytes += write_safetensors(directory / file, tensors)
        weight_map |= {tensor.name: file for tensor in tensors}
    if list(files) != [SINGLE_FILE]:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        write_json(directory / INDEX_FILE, index)
    drop = ("quantization_config", "compression_config", "sparsity_config")
    config = {key: value for key, value in source.config.items() if key not in drop}
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


@contextmanager
def work_directory(out: Path, fingerprint: Mapping[str, Any]) -> Iterator[Path]:
    """Give a directory beside `out` for unfinished work, which an interrupted run leaves for the next.

    It goes when the block ends well.

    Args:
        out: what is being made.
        fingerprint: what the work depends on, as JSON values.

    Raises:
        FileExistsError: `out` exists.
        ValueError: another run is at work there, or the work that is there is of another fingerprint.
    """
    refuse_existing(out)
    work = out.parent / f".{out.name}.unfinished"
    work.mkdir(parents=True, exist_ok=True)
    with (work / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"{out}: another run is making it") from error
        state = work / "fingerprint.json"
        if not state.exists():
            write_json(state, fingerprint)
        elif json.loads(state.read_text(encoding="utf-8")) != json.loads(json.dumps(fingerprint)):
            raise ValueError(
                f"{work} holds the work of an interrupted run with other options or another model: repeat "
                "that command to finish it, or remove the directory to start anew"
            )
        yield work
    shutil.rmtree(work)


def refuse_existing(out: Path) -> None:
    """Raise FileExistsError when `out` exists; nothing here overwrites a model."""
    if os.path.lexists(out):
        raise FileExistsError(f"{out} exists; remove it or name another output directory")


def write_json(file: Path, value: Mapping[str, Any]) -> None:
    """Write indented JSON with a final newline."""
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
