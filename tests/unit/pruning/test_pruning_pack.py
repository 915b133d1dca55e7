"""Packing and unpacking, the files and directories under them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from service.errors import CheckpointError
from service.pruning.calibration import CalibrationOptions
from service.pruning.checkpoint import (
    Checkpoint,
    new_directory,
    tensor_entry,
    write_safetensors,
)
from service.pruning.pack import unpack, write_packed
from service.pruning.prune import PruneOptions, prune


def bits(tensor: Tensor) -> Tensor:
    """The bytes: equal for NaN and unequal for zeros of different sign, unlike `==`."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def edge_checkpoint(directory: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """A directory whose matrices hold what tends to get lost: NaN payloads, -0.0, Inf, subnormals."""
    generator = torch.Generator().manual_seed(4)
    weight = torch.randn(7, 93, generator=generator).to(dtype)
    weight[torch.rand(7, 93, generator=generator) < 0.5] = 0
    weight[0, :6] = torch.tensor([-0.0, float("nan"), float("inf"), float("-inf"), 0.0, 1e-40]).to(dtype)
    integer = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    weight.view(integer)[1, 1] = -1  # a NaN with every bit set
    tensors = {
        "model.embed_tokens.weight": torch.zeros(9, 13, dtype=dtype),
        "model.layers.0.mlp.up_proj.weight": weight,
        "model.layers.0.mlp.up_proj.bias": torch.zeros(7, dtype=dtype),
        "model.layers.0.mlp.empty.weight": torch.zeros(5, 60, dtype=dtype),
        "model.layers.1.mlp.full.weight": torch.ones(6, 17, dtype=dtype),
        "model.layers.1.mlp.column.weight": torch.eye(40, 1).to(dtype),
        "model.layers.1.counter.weight": torch.zeros(8, 8, dtype=torch.int64),
        "lm_head.weight": torch.zeros(9, 13, dtype=dtype),
        "scale": torch.tensor(2.5),
    }
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps({"model_type": "llama"}), "utf-8")
    return tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_unpacking_a_packed_model_gives_back_every_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    """Every tensor, packed or not, and the config."""
    tensors = edge_checkpoint(tmp_path / "dense", dtype)
    packed = write_packed(tmp_path / "dense", tmp_path / "packed")
    unpacked = unpack(tmp_path / "packed", tmp_path / "again")
    got = load_file(tmp_path / "again" / "model.safetensors")

    assert got.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert got[name].dtype == tensor.dtype
        assert got[name].shape == tensor.shape
        assert torch.equal(bits(got[name]), bits(tensor)), name
    assert json.loads((tmp_path / "again" / "config.json").read_text("utf-8")) == {"model_type": "llama"}
    assert sorted(packed.modules) == unpacked.modules
    assert "model.layers.0.mlp.up_proj" in packed.modules
    assert packed.stored_bytes < packed.dense_bytes


def test_only_decoder_matrices_that_get_smaller_are_packed(tmp_path: Path) -> None:
    """Embeddings and head, though all zero, stay; so do integers, a full matrix, and a single column."""
    edge_checkpoint(tmp_path / "dense", torch.float32)

    report = write_packed(tmp_path / "dense", tmp_path / "packed")

    assert set(report.modules) == {"model.layers.0.mlp.up_proj", "model.layers.0.mlp.empty"}


def test_packing_pruned_safetensors_equals_pruning_to_packed(
    make_model: Callable[..., Path], text: Path, tmp_path: Path
) -> None:
    """One form, whichever way it was come by."""
    source = make_model("llama", max_shard_size="20KB")
    calibration = CalibrationOptions(text=text, sequences=2, sequence_tokens=50)
    prune(source, tmp_path / "packed", PruneOptions(calibration=calibration))
    prune(source, tmp_path / "dense", PruneOptions(calibration=calibration, output="dense"))
    write_packed(tmp_path / "dense", tmp_path / "repacked")

    for file in (tmp_path / "packed").glob("*.safetensors"):
        assert (tmp_path / "repacked" / file.name).read_bytes() == file.read_bytes()
    for name in ("config.json", "model.safetensors.index.json"):
        a, b = (json.loads((tmp_path / d / name).read_text("utf-8")) for d in ("packed", "repacked"))
        assert a == b


def test_a_model_without_zeros_is_not_packed(make_model: Callable[..., Path], tmp_path: Path) -> None:
    """It would only grow; nothing is written."""
    with pytest.raises(ValueError, match="prune it first"):
        write_packed(make_model("llama"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_dense_model_is_not_unpacked(make_model: Callable[..., Path], tmp_path: Path) -> None:
    """Copying it under another name would hide a mistaken path."""
    with pytest.raises(ValueError, match="holds no packed weight"):
        unpack(make_model("llama"), tmp_path / "out")


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("bitmask", lambda t: t ^ 1),
        ("row_offsets", lambda t: t + 1),
        ("compressed", lambda t: t[:-1]),
        ("compressed", lambda t: t.to(torch.float64)),
        ("shape", lambda t: t + 1),
        ("shape", lambda t: t[:1]),
        ("bitmask", lambda t: t.to(torch.int32)),
    ],
)
def test_a_packed_weight_that_disagrees_with_itself_is_refused(
    make_model: Callable[..., Path], tmp_path: Path, part: str, change: Callable[[Tensor], Tensor]
) -> None:
    """Naming the module; nothing is written."""
    prune(make_model("llama"), tmp_path / "packed", PruneOptions(method="magnitude"))
    file = tmp_path / "packed" / "model.safetensors"
    tensors = load_file(file)
    name = f"model.layers.1.mlp.gate_proj.{part}"
    tensors[name] = change(tensors[name]).contiguous()
    save_file(tensors, file)

    with pytest.raises(CheckpointError, match=r"packed weight model\.layers\.1\.mlp\.gate_proj"):
        unpack(tmp_path / "packed", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_written_files_are_read_by_the_reference_reader(tmp_path: Path) -> None:
    """Every type, no elements, no dimensions, odd counts of bytes before wider types."""
    tensors = {
        "odd": torch.arange(3, dtype=torch.uint8),
        "bf16": torch.randn(3, 5).bfloat16(),
        "half": torch.randn(2).half(),
        "f8": torch.randn(3).to(torch.float8_e4m3fn),
        "int": torch.arange(4),
        "scalar": torch.tensor(1.5),
        "empty": torch.zeros(0, 4),
        "bool": torch.tensor([True, False]),
        "strided": torch.arange(6.0).reshape(2, 3).T,
    }
    total = write_safetensors(tmp_path / "x.safetensors", [tensor_entry(n, t) for n, t in tensors.items()])

    got = load_file(tmp_path / "x.safetensors")
    assert total == sum(t.nbytes for t in tensors.values())
    assert got.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert got[name].dtype == tensor.dtype
        assert got[name].shape == tensor.shape
        assert torch.equal(bits(got[name]), bits(tensor)), name
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_a_truncated_file_is_refused_by_name(make_model: Callable[..., Path]) -> None:
    """What an interrupted download leaves."""
    file = make_model("llama") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])

    with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot be read as safetensors"):
        Checkpoint(file.parent)


@pytest.mark.parametrize("side", ["index", "file"])
def test_an_index_that_disagrees_with_its_files_is_refused(
    make_model: Callable[..., Path], side: str
) -> None:
    """With the tensor and the side it is missing from."""
    directory = make_model("llama", max_shard_size="20KB")
    index = directory / "model.safetensors.index.json"
    content = json.loads(index.read_text("utf-8"))
    if side == "index":
        content["weight_map"]["ghost.weight"] = content["weight_map"]["model.norm.weight"]
        odd = "ghost.weight is in the index but not the file"
    else:
        del content["weight_map"]["model.norm.weight"]
        odd = "model.norm.weight is in the file but not the index"
    index.write_text(json.dumps(content), "utf-8")

    with pytest.raises(CheckpointError, match=odd):
        Checkpoint(directory)


def test_an_index_cannot_point_outside_its_directory(make_model: Callable[..., Path]) -> None:
    """A model is data: it must not choose which of the user's files are read."""
    directory = make_model("llama", max_shard_size="20KB")
    index = directory / "model.safetensors.index.json"
    content = json.loads(index.read_text("utf-8"))
    content["weight_map"]["model.norm.weight"] = "../other.safetensors"
    index.write_text(json.dumps(content), "utf-8")

    with pytest.raises(CheckpointError, match="not a plain file name"):
        Checkpoint(directory)


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "gptq"}, "quant_method is 'gptq'"),
        ({"quant_method": "lacunar", "format_version": 2}, "format_version is 2"),
    ],
)
def test_a_model_in_another_form_is_refused(
    make_model: Callable[..., Path], quantization: dict[str, object], message: str
) -> None:
    """With what it says it is."""
    config = make_model("llama") / "config.json"
    content = {**json.loads(config.read_text("utf-8")), "quantization_config": quantization}
    config.write_text(json.dumps(content), "utf-8")

    with pytest.raises(CheckpointError, match=message):
        Checkpoint(config.parent)


def test_a_directory_without_safetensors_is_refused(tmp_path: Path) -> None:
    """Pickles are never opened."""
    (tmp_path / "config.json").write_text("{}", "utf-8")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")

    with pytest.raises(CheckpointError, match="only safetensors can be read"):
        Checkpoint(tmp_path)


def test_a_new_directory_has_the_usual_permissions(tmp_path: Path) -> None:
    """A server often runs as another user than the one who pruned; temporary files tend to be private."""
    plain = tmp_path / "plain"
    plain.mkdir()
    with new_directory(tmp_path / "out") as directory:
        write_safetensors(directory / "x.safetensors", [tensor_entry("a", torch.zeros(1))])
        (directory / "plain").write_bytes(b"")

    assert (tmp_path / "out").stat().st_mode == plain.stat().st_mode
    assert (tmp_path / "out" / "x.safetensors").stat().st_mode == (tmp_path / "out" / "plain").stat().st_mode


def test_an_output_that_appears_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    """Two runs into one directory: the second to finish fails, the first's result stays."""
    block = new_directory(tmp_path / "out")
    block.__enter__()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "first").write_bytes(b"")

    with pytest.raises(FileExistsError):
        block.__exit__(None, None, None)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "first").exists()
