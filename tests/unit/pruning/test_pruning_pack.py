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
from service.model.checkpoint import Checkpoint
from service.pruning.calibration import CalibrationOptions
from service.pruning.pack import pack, unpack, verify
from service.pruning.prune import PruneOptions, prune
from service.pruning.writer import new_directory, pending, write_safetensors


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
    packed = pack(tmp_path / "dense", tmp_path / "packed", keep_negative_zeros=True)
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

    report = pack(tmp_path / "dense", tmp_path / "packed")

    assert set(report.modules) == {"model.layers.0.mlp.up_proj", "model.layers.0.mlp.empty"}


def test_packing_pruned_safetensors_equals_pruning_to_packed(
    make_model: Callable[..., Path], text: Path, tmp_path: Path
) -> None:
    """One form, whichever way it was come by."""
    source = make_model("llama", max_shard_size="20KB")
    calibration = CalibrationOptions(text=text, sequences=2, sequence_tokens=50)
    prune(source, tmp_path / "packed", PruneOptions(calibration=calibration))
    prune(source, tmp_path / "dense", PruneOptions(calibration=calibration, output="dense"))
    pack(tmp_path / "dense", tmp_path / "repacked")

    for file in (tmp_path / "packed").glob("*.safetensors"):
        assert (tmp_path / "repacked" / file.name).read_bytes() == file.read_bytes()
    for name in ("config.json", "model.safetensors.index.json"):
        a, b = (json.loads((tmp_path / d / name).read_text("utf-8")) for d in ("packed", "repacked"))
        assert a == b


def test_a_model_without_zeros_is_not_packed(make_model: Callable[..., Path], tmp_path: Path) -> None:
    """It would only grow; nothing is written."""
    with pytest.raises(ValueError, match="prune it first"):
        pack(make_model("llama"), tmp_path / "out")
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

    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.gate_proj\."):
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
    total = write_safetensors(tmp_path / "x.safetensors", [pending(n, t) for n, t in tensors.items()])

    got = load_file(tmp_path / "x.safetensors")
    assert total == sum(t.nbytes for t in tensors.values())
    assert got.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert got[name].dtype == tensor.dtype
        assert got[name].shape == tensor.shape
        assert torch.equal(bits(got[name]), bits(tensor)), name
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        metadata = file.metadata()
    assert metadata.pop("format") == "pt"
    assert metadata.keys() == {f"sha256:{name}" for name in tensors}


def test_a_new_directory_has_the_usual_permissions(tmp_path: Path) -> None:
    """A server often runs as another user than the one who pruned; temporary files tend to be private."""
    plain = tmp_path / "plain"
    plain.mkdir()
    with new_directory(tmp_path / "out") as directory:
        write_safetensors(directory / "x.safetensors", [pending("a", torch.zeros(1))])
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


def test_negative_zeros_are_dropped_unless_they_are_to_be_kept(tmp_path: Path) -> None:
    """A mask leaves one for every negative weight: stored as values they would undo the gain."""
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    weight *= torch.rand(8, 64, generator=torch.Generator().manual_seed(2)) < 0.5
    minus = int(((weight == 0) & torch.signbit(weight)).sum())
    assert minus > 50
    (tmp_path / "dense").mkdir()
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({name: weight}, tmp_path / "dense" / "model.safetensors")
    (tmp_path / "dense" / "config.json").write_text("{}", "utf-8")

    report = pack(tmp_path / "dense", tmp_path / "packed")
    kept = pack(tmp_path / "dense", tmp_path / "kept", keep_negative_zeros=True)

    assert report.negative_zeros == minus
    assert kept.negative_zeros == 0
    assert report.stored_bytes == kept.stored_bytes - 4 * minus
    for directory, same in (("packed", weight + 0.0), ("kept", weight)):
        unpack(tmp_path / directory, tmp_path / f"{directory}-again")
        got = load_file(tmp_path / f"{directory}-again" / "model.safetensors")[name]
        assert torch.equal(bits(got), bits(same))
        found = verify(tmp_path / directory, against=tmp_path / "dense")
        assert found.only_sign_of_zero == (minus if directory == "packed" else 0)
        assert found.compared_elements == 8 * 64


def test_verify_reads_every_tensor_and_counts_digests(
    make_model: Callable[..., Path], tmp_path: Path
) -> None:
    """A dense model from elsewhere has none: then only its structure is checked, and the figures say so."""
    source = make_model("llama", max_shard_size="20KB")
    prune(source, tmp_path / "packed", PruneOptions(method="magnitude"))
    theirs, ours = verify(source), verify(tmp_path / "packed")

    assert (theirs.with_digest, ours.with_digest) == (0, ours.tensors + 3 * 21)
    assert theirs.tensors == ours.tensors


@pytest.mark.parametrize("where", ["embed_tokens.weight", "norm.weight", "up_proj.compressed"])
def test_verify_finds_a_flipped_bit_anywhere(
    make_model: Callable[..., Path], tmp_path: Path, where: str
) -> None:
    """Packed or not, large or small."""
    prune(make_model("llama"), tmp_path / "packed", PruneOptions(method="magnitude"))
    with Checkpoint.open(tmp_path / "packed") as checkpoint:
        parts = [part for entry in checkpoint.entries.values() for part in entry.parts]
    part = next(part for part in parts if part.name.endswith(where))
    raw = bytearray(part.file.read_bytes())
    raw[part.offset + 1] ^= 64
    part.file.write_bytes(raw)

    with pytest.raises(CheckpointError, match=f"{where}: expected the contents that were written"):
        verify(tmp_path / "packed")


def test_verify_against_another_model_names_the_first_difference(
    make_model: Callable[..., Path], tmp_path: Path
) -> None:
    """The values, the shape, or the tensor that only one has."""
    source = make_model("llama")
    prune(source, tmp_path / "packed", PruneOptions(method="magnitude"))

    with pytest.raises(CheckpointError, match=r"layers\.0.*expected the values of .*first at element"):
        verify(tmp_path / "packed", against=source)
    with pytest.raises(CheckpointError, match="expected in both models"):
        verify(source, against=make_model("llama_untied", "other"))


def test_every_form_becomes_ours(tmp_path: Path) -> None:
    """Files of compressed-tensors are packed anew: one naming, and what it packed needlessly plain."""
    samples = Path(__file__).parents[2] / "data" / "compressed_tensors"
    (tmp_path / "ct").mkdir()
    (tmp_path / "ct" / "model.safetensors").write_bytes(
        (samples / "ct0.8.1-bitmask.safetensors").read_bytes()
    )
    claim = {"compression_config": {"sparsity_config": {"format": "sparse-bitmask"}}}
    (tmp_path / "ct" / "config.json").write_text(json.dumps(claim), "utf-8")

    pack(tmp_path / "ct", tmp_path / "ours")

    names = set(load_file(tmp_path / "ours" / "model.safetensors"))
    parts = {
        f"model.layers.0.mlp.up_proj.{part}" for part in ("compressed", "bitmask", "row_offsets", "shape")
    }
    assert parts < names
    assert {"model.norm.weight", "model.embed_tokens.weight", "model.layers.0.q.bias"} < names
    config = json.loads((tmp_path / "ours" / "config.json").read_text("utf-8"))
    assert config == {
        "quantization_config": {"quant_method": "lacunar", "format_version": 1, "format": "bitmask"}
    }
    assert verify(tmp_path / "ours", against=tmp_path / "ct").compared_elements == 10 * 20 * 4 + 10 + 20
