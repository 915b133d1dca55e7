"""What safetensors files and their index say of the tensors in them: parsed, and every claim checked."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from service.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

# Tags of the safetensors format. Tags with no torch dtype here cannot be part of a checkpoint that is served.
DTYPES: dict[str, torch.dtype] = {
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
TAGS = {dtype: tag for tag, dtype in DTYPES.items()}
# In a file's metadata, before a tensor's name: the digest of what was written. See tensor_digest.
DIGEST_KEY = "sha256:"
# The limit that the safetensors format sets on its header.
_MAX_HEADER_BYTES = 100_000_000
# An empty tensor has no bytes that would bound its other sizes; nothing real has more rows of nothing.
_MAX_EMPTY_SIZE = 2**31


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A plain tensor: where its bytes lie and what the file's header says of them.

    `digest` is the SHA-256 that the file's metadata gives for it (see `tensor_digest`), or "".
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int
    digest: str = ""

    @property
    def parts(self) -> tuple[TensorEntry, ...]:
        """The stored tensors that make it up: itself."""
        return (self,)


def tensor_digest(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Any:
    """A SHA-256 over a tensor's name, type and shape; update it with the bytes as they lie in the file."""
    return hashlib.sha256(f"{name} {TAGS[dtype]} {list(shape)}\n".encode("utf-8", "surrogatepass"))


def fault(file: Path, tensor: str | None, expected: str, found: str, hint: str = "") -> CheckpointError:
    """Make the error for one inconsistency: file, tensor, what was expected, what was found, what next."""
    where = f"{file}: tensor {tensor}" if tensor is not None else f"{file}"
    return CheckpointError(f"{where}: expected {expected}, found {found}{'. ' + hint if hint else ''}")


def read_json(file: Path, what: str) -> dict[str, Any]:
    """Parse a JSON object; raises CheckpointError that says ``what`` was expected in ``file``."""
    if not file.is_file():
        raise fault(file, None, what, "no such file")
    value = _parse_json(file, file.read_bytes())
    if not isinstance(value, dict):
        raise fault(file, None, "a JSON object", type(value).__name__)
    return value


def _parse_json(file: Path, text: bytes, what: str = "JSON", **options: Any) -> Any:
    try:
        return json.loads(text, **options)
    except ValueError as error:
        raise fault(file, None, what, f"a syntax error ({error})") from error
    except RecursionError as error:
        raise fault(file, None, what, "brackets nested deeper than any configuration's") from error


def weight_files(root: Path) -> list[Path]:
    """The safetensors files that make up the model: one file, or the shards that the index names."""
    single, index = root / SINGLE_FILE, root / INDEX_FILE
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
    weight_map = read_json(index, "the index of the shards").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise fault(index, None, "a weight_map from tensor names to files", type(weight_map).__name__)
    for name, shard in weight_map.items():
        if not isinstance(shard, str):
            raise fault(index, name, "a file name", repr(shard))
    return weight_map


def check_index(root: Path, plain: dict[str, TensorEntry]) -> None:
    """Hold the index and the shards' headers to each other."""
    index = root / INDEX_FILE
    if (root / SINGLE_FILE).is_file():
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


def read_header(file: Path) -> list[TensorEntry]:
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
    header = _parse_json(file, text, "a JSON header", object_pairs_hook=_unique_pairs)
    if not isinstance(header, dict):
        raise fault(file, None, "a JSON object as header", type(header).__name__)
    metadata = header.pop("__metadata__", None)
    digests = metadata if isinstance(metadata, dict) else {}
    digested = {key.removeprefix(DIGEST_KEY) for key in digests if key.startswith(DIGEST_KEY)}
    if digested and digested != header.keys():
        # A damaged name of a digest must not leave its tensor unchecked.
        odd = sorted(digested ^ header.keys())[0]
        raise fault(file, odd, "a digest of every tensor in the metadata", "it in one of the two only")
    start = 8 + length
    entries = [
        _parse_entry(file, name, value, start, size, digests.get(DIGEST_KEY + name, ""))
        for name, value in header.items()
    ]
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


def _parse_entry(file: Path, name: str, value: object, start: int, size: int, digest: object) -> TensorEntry:
    if not isinstance(value, dict):
        raise fault(file, name, "an object with dtype, shape and data_offsets", type(value).__name__)
    tag, shape, offsets = value.get("dtype"), value.get("shape"), value.get("data_offsets")
    if not isinstance(tag, str) or tag not in DTYPES:
        raise fault(file, name, f"a dtype among {', '.join(DTYPES)}", repr(tag))
    if not isinstance(shape, list) or not all(_is_size(n) for n in shape):
        raise fault(file, name, "a shape of non-negative integers", repr(shape))
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(n) for n in offsets):
        raise fault(file, name, "two data_offsets", repr(offsets))
    dtype = DTYPES[tag]
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
    if nbytes == 0 and max(shape) > _MAX_EMPTY_SIZE:
        raise fault(file, name, f"sizes of at most {_MAX_EMPTY_SIZE} in an empty tensor", str(shape))
    if not isinstance(digest, str):
        raise fault(file, name, "a text as its digest in the metadata", type(digest).__name__)
    return TensorEntry(name, dtype, tuple(shape), file, start + offsets[0], nbytes, digest)
