"""Reading checkpoint directories: what is read is exact, and what is wrong is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from service.errors import CheckpointError, SettingsError
from service.model.checkpoint import Checkpoint, PackedEntry
from service.model.inspect import inspect_checkpoint
from service.model.loader import load_model
from service.pruning.pack import pack
from tests.unit.model.checkpoint_files import (
    edit_config,
    edit_header,
    edit_tensors,
    pack_directory,
    pack_matrix,
    shard_directory,
    small_llama,
    write_index,
)

SAMPLES = Path(__file__).parents[2] / "data" / "compressed_tensors"
UP = "model.layers.1.mlp.up_proj"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound plain checkpoint."""
    return small_llama(tmp_path_factory.mktemp("plain")).path


@pytest.fixture
def model(plain: Path, tmp_path: Path) -> Path:
    """A copy of it to break."""
    return Path(shutil.copytree(plain, tmp_path / "model"))


@pytest.fixture
def packed(plain: Path, tmp_path: Path) -> Path:
    """The same model in the packed form, to break."""
    pack_directory(plain, tmp_path / "packed")
    return tmp_path / "packed"


def dense_of(path: Path, name: str, dtype: torch.dtype) -> torch.Tensor:
    """Read one tensor through the checkpoint reader."""
    with Checkpoint.open(path) as checkpoint:
        entry = checkpoint.entries[name]
        out = torch.empty(entry.shape, dtype=dtype)
        checkpoint.read_into(entry, out)
    return out


# --- what is read ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_plain_tensors_are_read_and_converted(
    stored: torch.dtype, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Every stored dtype to every served one, rounded once."""
    weight = torch.randn(37, 21).to(stored)
    save_file({"a.weight": weight, "b": torch.ones(3)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    assert torch.equal(dense_of(tmp_path, "a.weight", dtype), weight.to(dtype))


@pytest.mark.parametrize("shape", [(1, 1), (1, 63), (64, 8), (9, 65), (1200, 1100)])
def test_packed_matrices_unpack_to_what_was_packed(shape: tuple[int, int], tmp_path: Path) -> None:
    """Sizes beside byte borders, and one that is read in more than one piece."""
    dense = torch.randn(shape).to(torch.bfloat16)
    dense[torch.rand(shape) < 0.6] = 0
    save_file(
        {f"m.{part}": value for part, value in pack_matrix(dense).items()}, tmp_path / "model.safetensors"
    )
    (tmp_path / "config.json").write_text("{}")
    assert torch.equal(dense_of(tmp_path, "m.weight", torch.bfloat16), dense)
    with Checkpoint.open(tmp_path) as checkpoint:
        entry = checkpoint.entries["m.weight"]
        assert isinstance(entry, PackedEntry)
        bitmap = torch.empty(entry.bitmask.shape, dtype=torch.uint8)
        values = torch.empty(entry.nnz, dtype=torch.float32)
        counts = checkpoint.read_packed_into(entry, bitmap, values)
    assert torch.equal(counts, (dense != 0).sum(dim=1))
    assert torch.equal(values, dense[dense != 0].float())


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_empty_and_full_packed_matrices(value: float, tmp_path: Path) -> None:
    """100% and 0% sparse."""
    dense = torch.full((5, 19), value)
    save_file({f"m.{part}": v for part, v in pack_matrix(dense).items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    assert torch.equal(dense_of(tmp_path, "m.weight", torch.float32), dense)


@pytest.mark.parametrize(
    ("sample", "source"),
    [
        ("ct0.8.1-bitmask", "dense-source"),
        ("ct0.14.0.1-bitmask", "dense-source"),
        ("ct0.9.4-24bitmask", "dense24-source"),
        ("ct0.14.0.1-24bitmask", "dense24-source"),
    ],
)
def test_files_that_compressed_tensors_wrote_are_read(sample: str, source: str, tmp_path: Path) -> None:
    """Every form and key naming, vectors packed as well, against the dense source."""
    shutil.copy(SAMPLES / f"{sample}.safetensors", tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    wanted = load_file(SAMPLES / f"{source}.safetensors")
    with Checkpoint.open(tmp_path) as checkpoint:
        assert set(checkpoint.entries) == set(wanted)
    for name, dense in wanted.items():
        if dense.dtype == torch.float8_e4m3fn:
            with (
                pytest.raises(CheckpointError, match="found float8_e4m3fn"),
                Checkpoint.open(tmp_path) as opened,
            ):
                opened.find(name, tuple(dense.shape))
            continue
        # NaN and Inf come back as they are, -0.0 as 0.0.
        got = dense_of(tmp_path, name, dense.dtype)
        torch.testing.assert_close(got, dense, rtol=0, atol=0, equal_nan=True, msg=name)


def masked(dense: torch.Tensor, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """As torch.nn.utils.prune stores it, with something in place of what is masked."""
    original = torch.where(dense == 0, torch.full_like(dense, float("-inf")), dense)
    return {"weight_orig": original, "weight_mask": (dense != 0).to(dtype)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.bool])
def test_a_weight_and_its_mask_are_one_tensor(dtype: torch.dtype, tmp_path: Path) -> None:
    """What is masked is +0 whatever it was: torch would make -0 of it, or NaN of an infinite one."""
    dense = torch.randn(1200, 1100)
    dense[torch.rand(1200, 1100) < 0.5] = 0
    save_file(
        {f"m.{part}": value for part, value in masked(dense, dtype).items()}, tmp_path / "model.safetensors"
    )
    (tmp_path / "config.json").write_text("{}")
    got = dense_of(tmp_path, "m.weight", torch.float32)
    assert torch.equal(got.view(torch.int32), dense.view(torch.int32))


def test_a_mask_of_other_numbers_is_refused(tmp_path: Path) -> None:
    """A soft mask is a scale, and dropping it would change the model."""
    parts = masked(torch.ones(3, 4), torch.float32)
    parts["weight_mask"][1, 2] = 0.5
    save_file({f"m.{part}": value for part, value in parts.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(
        CheckpointError, match=r"m\.weight_mask: expected a mask of zeros and ones.*0\.5 in row 1, co"
    ):
        dense_of(tmp_path, "m.weight", torch.float32)


def test_explicit_zeros_among_packed_values_count_as_stored(packed: Path) -> None:
    """They cost space, so reports and choices count them; loading and inspecting agree."""
    name = f"{UP}.compressed"
    values = load_file(packed / "model.safetensors")[name]
    values[:10] = torch.tensor([0.0, -0.0]).repeat(5)
    edit_tensors(packed, {name: values})
    assert inspect_checkpoint(packed).layers == list(load_model(packed).layer_reports())


def test_shards_are_read_through_their_index(model: Path) -> None:
    """Two files and an index give the model that one file gave."""
    before = {report.name: report for report in load_model(model).layer_reports()}
    shard_directory(model)
    assert {report.name: report for report in load_model(model).layer_reports()} == before


def test_packed_model_equals_the_plain_one(plain: Path, packed: Path) -> None:
    """Fusing packed matrices is concatenating rows: the layers must come out bit for bit."""
    a, b = load_model(plain), load_model(packed)
    pairs = list(zip(a._linears(), b._linears(), strict=True))
    assert "bitmap" in {one.stored.name for one, _ in pairs}
    for one, other in pairs:
        assert one.stored == other.stored
        assert torch.equal(one.dense(), other.dense()), one.name


@pytest.mark.parametrize(
    "claim",
    [
        {
            "quant_method": "compressed-tensors",
            "sparsity_config": {"format": "sparse-bitmask"},
            "config_groups": {},
        },
        {"sparsity_config": {"format": "dense"}},
    ],
)
def test_sparsity_claims_of_other_tools_do_not_matter(
    claim: dict[str, Any], plain: Path, tmp_path: Path
) -> None:
    """Keys decide which form a tensor has, not what the configuration claims."""
    pack_directory(plain, tmp_path / "p", claim=claim)
    assert load_model(tmp_path / "p").spec.num_layers == 3


def test_negative_zeros_are_zeros(model: Path) -> None:
    """Pruning by a mask leaves -0.0 for negative weights; stored as values they would undo the gain."""
    name = f"{UP}.weight"
    weight = load_file(model / "model.safetensors")[name]
    edit_tensors(model, {name: torch.where(weight == 0, -0.0, weight)})
    layers = {layer.name: layer for layer in load_model(model)._linears()}
    fused = layers["model.layers.1.mlp.gate_up_proj"]
    assert fused.nnz == fused.weight.nnz == int(torch.count_nonzero(fused.dense()))
    assert fused.stored.name == "bitmap"


def test_nan_inf_and_subnormals_are_kept(tmp_path: Path) -> None:
    """Broken or tiny values are the model's business; none may turn into another."""
    save_model = small_llama(tmp_path)
    name = f"{UP}.weight"
    weight = load_file(save_model.path / "model.safetensors")[name]
    weight[0, :4] = torch.tensor([float("nan"), float("inf"), float("-inf"), 1e-40])
    edit_tensors(tmp_path, {name: weight})
    layers = {layer.name: layer for layer in load_model(tmp_path)._linears()}
    got = layers["model.layers.1.mlp.gate_up_proj"].dense()[104, :4]
    assert torch.equal(got.view(torch.int32), weight[0, :4].view(torch.int32))


def test_rotary_buffers_of_old_checkpoints_are_skipped(model: Path) -> None:
    """transformers used to store them; they are computed now."""
    edit_tensors(model, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6)})
    assert load_model(model).spec.num_layers == 3


# --- what is refused ---


def corrupt(path: Path, how: Callable[[Path], None]) -> str:
    """Break a checkpoint; return the message that loading and inspecting give."""
    how(path)
    with pytest.raises(CheckpointError) as loading:
        load_model(path)
    with pytest.raises(CheckpointError) as inspecting:
        inspect_checkpoint(path)
    assert str(inspecting.value) == str(loading.value)
    return str(loading.value)


def _truncate(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _cut_header(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:40])


def _append(path: Path) -> None:
    with (path / "model.safetensors").open("ab") as file:
        file.write(b"\0" * 8)


def _header(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    return lambda path: edit_header(path / "model.safetensors", change)


def _set(name: str, **fields: Any) -> Callable[[Path], None]:
    return _header(lambda header: header[name].update(fields))


def _shift(header: dict[str, Any]) -> None:
    """Let a tensor claim the bytes of its neighbour."""
    start, end = header["model.norm.weight"]["data_offsets"]
    header["model.norm.weight"]["data_offsets"] = [start - 4, end - 4]


def _twice(header: dict[str, Any]) -> bytes:
    text = json.dumps(header)
    name = '"model.norm.weight": '
    return (text[:-1] + ", " + name + json.dumps(header["model.norm.weight"]) + "}").encode()


PLAIN_FAULTS: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "no directory": (lambda path: shutil.rmtree(path), ["expected a directory", "found nothing"]),
    "no config": (lambda path: (path / "config.json").unlink(), ["config.json", "no such file"]),
    "config is no JSON": (
        lambda path: (path / "config.json").write_text("{"),
        ["config.json", "expected JSON"],
    ),
    "config is a list": (lambda path: (path / "config.json").write_text("[]"), ["config.json", "found list"]),
    "no model_type": (lambda path: edit_config(path, model_type=None), ["config.json", "model_type"]),
    "unknown model_type": (
        lambda path: edit_config(path, model_type="nonsense"),
        ["config.json", "'nonsense'"],
    ),
    "no weights": (
        lambda path: (path / "model.safetensors").unlink(),
        ["model.safetensors", "found neither"],
    ),
    "pickled weights": (
        lambda path: (path / "model.safetensors").rename(path / "pytorch_model.bin"),
        ["pytorch_model.bin is not read", "Convert to safetensors"],
    ),
    "truncated data": (_truncate, ["model.safetensors", "truncated"]),
    "truncated header": (_cut_header, ["model.safetensors", "truncated or not safetensors"]),
    "bytes at the end": (_append, ["model.safetensors", "a file of"]),
    "header is no JSON": (_header(lambda header: b"{" * 64), ["model.safetensors", "JSON header"]),
    "header names a tensor twice": (_header(_twice), ["model.safetensors", "'model.norm.weight' twice"]),
    "tensors overlap": (_header(_shift), ["model.safetensors", "model.norm.weight", "an overlap or a hole"]),
    "header with an unknown dtype": (_set("model.norm.weight", dtype="F4"), ["model.norm.weight", "'F4'"]),
    "header with a larger shape": (
        _set("model.norm.weight", shape=[73]),
        ["model.norm.weight", "expected 292 bytes for F32 [73]", "span 288"],
    ),
    "header with a negative size": (
        _set("model.norm.weight", shape=[-72]),
        ["model.norm.weight", "non-negative", "[-72]"],
    ),
    "header with offsets past the end": (
        _set("model.norm.weight", data_offsets=[10**9, 10**9 + 288]),
        ["model.norm.weight", "truncated"],
    ),
    "missing tensor": (
        lambda path: edit_tensors(path, {"model.norm.weight": None}),
        ["tensor model.norm.weight", "expected a tensor of shape [72]", "found none"],
    ),
    "missing projection": (
        lambda path: edit_tensors(path, {f"{UP}.weight": None}),
        [f"tensor {UP}.weight", "expected a tensor of shape [104, 72]", "found none"],
    ),
    "unexpected tensor": (
        lambda path: edit_tensors(path, {"model.layers.0.self_attn.q_proj.bias": torch.zeros(72)}),
        ["model.safetensors", "model.layers.0.self_attn.q_proj.bias", "unknown"],
    ),
    "layer too many": (
        lambda path: edit_config(path, num_hidden_layers=2),
        ["model.layers.2.", "config.json describes", "found 9 unknown"],
    ),
    "wrong shape": (
        lambda path: edit_tensors(path, {f"{UP}.weight": torch.zeros(104, 71)}),
        ["model.safetensors", f"{UP}.weight", "expected shape [104, 72]", "found shape [104, 71]"],
    ),
    "transposed": (
        lambda path: edit_tensors(path, {f"{UP}.weight": torch.zeros(72, 104)}),
        [f"{UP}.weight", "expected shape [104, 72]", "found shape [72, 104]"],
    ),
    "integer weight": (
        lambda path: edit_tensors(path, {f"{UP}.weight": torch.zeros(104, 72, dtype=torch.int8)}),
        [f"{UP}.weight", "expected dtype float32, bfloat16 or float16", "found int8"],
    ),
    "double weight": (
        lambda path: edit_tensors(path, {f"{UP}.weight": torch.zeros(104, 72, dtype=torch.float64)}),
        [f"{UP}.weight", "found float64"],
    ),
    "fp8 weight": (
        lambda path: edit_tensors(path, {f"{UP}.weight": torch.zeros(104, 72).to(torch.float8_e4m3fn)}),
        [f"{UP}.weight", "found float8_e4m3fn"],
    ),
    "quantised by its config": (
        lambda path: edit_config(path, quantization_config={"quant_method": "gptq", "bits": 4}),
        ["config.json", "quantised (gptq)"],
    ),
    "quantised by compressed-tensors": (
        lambda path: edit_config(
            path, quantization_config={"quant_method": "compressed-tensors", "config_groups": {"g": {}}}
        ),
        ["config.json", "quantised (compressed-tensors"],
    ),
    "GPTQ tensors": (
        lambda path: edit_tensors(path, {f"{UP}.qweight": torch.zeros(2, dtype=torch.int32)}),
        [f"{UP}.qweight", "GPTQ or AWQ"],
    ),
    "marlin-24": (
        lambda path: edit_tensors(
            path,
            {
                f"{UP}.weight_packed": torch.zeros(2, dtype=torch.int32),
                f"{UP}.scale_packed": torch.zeros(2),
                f"{UP}.meta": torch.zeros(2, dtype=torch.int16),
            },
        ),
        [f"{UP}.scale_packed", "marlin-24", "Give the checkpoint that it was quantised from"],
    ),
    "a mask alone": (
        lambda path: edit_tensors(path, {f"{UP}.weight_mask": torch.ones(104, 72)}),
        [f"{UP}.weight_orig", "masked tensor", "found none"],
    ),
    "a mask of another shape": (
        lambda path: edit_tensors(
            path,
            {
                f"{UP}.weight": None,
                f"{UP}.weight_orig": torch.ones(104, 72),
                f"{UP}.weight_mask": torch.ones(104, 1),
            },
        ),
        [f"{UP}.weight_mask", "expected", "[104, 72]", "found float32 [104, 1]"],
    ),
    "a masked weight that is there dense too": (
        lambda path: edit_tensors(
            path,
            {f"{UP}.weight_orig": torch.ones(104, 72), f"{UP}.weight_mask": torch.ones(104, 72)},
        ),
        [f"{UP}.weight", "one form of each weight"],
    ),
    "an empty tensor of endless rows": (
        _set("model.norm.weight", shape=[2**62, 0], data_offsets=[0, 0]),
        ["model.norm.weight", "sizes of at most"],
    ),
}


@pytest.mark.parametrize("fault", PLAIN_FAULTS)
def test_faults_of_plain_checkpoints_are_named(fault: str, model: Path) -> None:
    """File, tensor, expected and found are in the message, from load and inspect alike."""
    how, words = PLAIN_FAULTS[fault]
    message = corrupt(model, how)
    assert str(model) in message
    for word in words:
        assert word in message


def _packed(part: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Callable[[Path], None]:
    def how(path: Path) -> None:
        name = f"{UP}.{part}"
        edit_tensors(path, {name: change(load_file(path / "model.safetensors")[name])})

    return how


def _flip(bitmask: torch.Tensor) -> torch.Tensor:
    bitmask[7, 3] ^= 16
    return bitmask


def _swap_bits(bitmask: torch.Tensor) -> torch.Tensor:
    """Move a bit to another row: the total stays right."""
    row = int(torch.nonzero(bitmask[7] & 1)[0])
    column = int(torch.nonzero((bitmask[8] & 1) == 0)[0])
    bitmask[7, row] &= 0xFE
    bitmask[8, column] |= 1
    return bitmask


def _fall(offsets: torch.Tensor) -> torch.Tensor:
    offsets[5] = offsets[6] + 1
    return offsets


def _late(offsets: torch.Tensor) -> torch.Tensor:
    return offsets + 1


PACKED_FAULTS: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "a bit too many or too few": (_packed("bitmask", _flip), [f"{UP}.bitmask", "bits set in row 7"]),
    "a bit in the wrong row": (_packed("bitmask", _swap_bits), [f"{UP}.bitmask", "bits set in row 7"]),
    "a value too few": (_packed("compressed", lambda v: v[:-1].clone()), [f"{UP}.", "103"]),
    "a value too many": (
        _packed("compressed", lambda v: torch.cat((v, v[:1]))),
        [f"{UP}.bitmask", "row 103"],
    ),
    "offsets that fall": (_packed("row_offsets", _fall), [f"{UP}.row_offsets", "row 5"]),
    "offsets that start late": (
        _packed("row_offsets", _late),
        [f"{UP}.row_offsets", "row 0 to start at value 0"],
    ),
    "offsets too short": (
        _packed("row_offsets", lambda o: o[:-1].clone()),
        [f"{UP}.row_offsets", "expected int64 [104]", "found int64 [103]"],
    ),
    "offsets of 32 bits": (
        _packed("row_offsets", lambda o: o.to(torch.int32)),
        [f"{UP}.row_offsets", "expected int64 [104]", "found int32"],
    ),
    "a bitmask too narrow": (
        _packed("bitmask", lambda b: b[:, :-1].clone()),
        [f"{UP}.bitmask", "expected uint8 [104, 9]", "found uint8 [104, 8]"],
    ),
    "a shape that lies": (
        _packed("shape", lambda s: torch.tensor([104, 80])),
        [f"{UP}.bitmask", "expected uint8 [104, 10]"],
    ),
    "a shape that fits the bitmask but not the config": (
        _packed("shape", lambda s: torch.tensor([104, 71])),
        [f"{UP}.weight", "expected shape [104, 72]", "found shape [104, 71]"],
    ),
    "a huge shape": (_packed("shape", lambda s: torch.tensor([2**62, 72])), [f"{UP}.bitmask"]),
    "a negative shape": (
        _packed("shape", lambda s: torch.tensor([-104, -72])),
        [f"{UP}.shape", "at least 0"],
    ),
    "a float shape": (_packed("shape", lambda s: s.float()), [f"{UP}.shape", "expected int64 [2]"]),
    "no bitmask": (_packed("bitmask", lambda b: None), [f"{UP}.bitmask", "found none"]),
    "no shape": (_packed("shape", lambda s: None), [f"{UP}.shape", "found none"]),
    "no values": (_packed("compressed", lambda v: None), [f"{UP}.compressed", "found none"]),
    "quantised values": (
        _packed("compressed", lambda v: v.to(torch.float8_e4m3fn)),
        [f"{UP}.weight", "float8"],
    ),
    "both forms": (
        lambda path: edit_tensors(path, {f"{UP}.weight": torch.zeros(104, 72)}),
        [f"{UP}.weight", "one form of each weight"],
    ),
    "a newer version": (
        lambda path: edit_config(
            path, quantization_config={"quant_method": "lacunar", "format_version": 2, "format": "bitmask"}
        ),
        ["config.json", "version 2", "newer Lacunar"],
    ),
}


@pytest.mark.parametrize("fault", PACKED_FAULTS)
def test_faults_of_packed_checkpoints_are_named(fault: str, packed: Path) -> None:
    """A bitmap that disagrees with its values never reaches a kernel."""
    how, words = PACKED_FAULTS[fault]
    message = corrupt(packed, how)
    for word in words:
        assert word in message


def test_bits_past_the_last_column_are_refused(tmp_path: Path) -> None:
    """K=20 leaves four spare bits a row; a set one would be read as a value of the next row."""
    parts = pack_matrix(torch.ones(3, 20))
    parts["bitmask"][1, 2] = 0b0001_0111
    save_file({f"m.{part}": value for part, value in parts.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"m\.bitmask.*past column 19.*row 1"):
        dense_of(tmp_path, "m.weight", torch.float32)


INDEX_FAULTS: dict[str, tuple[Callable[[Path, dict[str, Any]], None], list[str]]] = {
    "no index": (
        lambda path, index: (path / "model.safetensors.index.json").unlink(),
        ["model-00001-of-00002.safetensors", "no index"],
    ),
    "a shard is missing": (
        lambda path, index: (path / "model-00002-of-00002.safetensors").unlink(),
        ["index.json", "model-00002-of-00002.safetensors", "no such file"],
    ),
    "an entry is missing": (
        lambda path, index: write_index(
            path, {"weight_map": {k: v for k, v in index["weight_map"].items() if k != "model.norm.weight"}}
        ),
        ["index.json", "model.norm.weight", "expected an entry"],
    ),
    "an entry names the wrong shard": (
        lambda path, index: write_index(
            path,
            {"weight_map": index["weight_map"] | {"model.norm.weight": "model-00001-of-00002.safetensors"}},
        ),
        ["model.norm.weight", "model-00001-of-00002.safetensors", "it in model-00002-of-00002.safetensors"],
    ),
    "an entry for nothing": (
        lambda path, index: write_index(
            path, {"weight_map": index["weight_map"] | {"ghost": "model-00001-of-00002.safetensors"}}
        ),
        ["tensor ghost", "it in no shard"],
    ),
    "a shard outside of the directory": (
        lambda path, index: write_index(path, {"weight_map": {"lm_head.weight": "../other.safetensors"}}),
        ["index.json", "names of files in this directory", "../other.safetensors"],
    ),
    "no weight_map": (lambda path, index: write_index(path, {"metadata": {}}), ["index.json", "weight_map"]),
    "a tensor in two shards": (
        lambda path, index: shutil.copy(
            path / "model-00002-of-00002.safetensors", path / "model-00001-of-00002.safetensors"
        ),
        ["expected each tensor in one file"],
    ),
}


@pytest.mark.parametrize("fault", INDEX_FAULTS)
def test_faults_of_the_index_are_named(fault: str, model: Path) -> None:
    """An index and its shards are held to each other."""
    index = shard_directory(model)
    how, words = INDEX_FAULTS[fault]
    message = corrupt(model, lambda path: how(path, index))
    for word in words:
        assert word in message


def _break_24(path: Path, part: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    shutil.copy(SAMPLES / "ct0.14.0.1-24bitmask.safetensors", path / "model.safetensors")
    (path / "config.json").write_text("{}")
    name = f"model.layers.0.up.{part}"
    edit_tensors(path, {name: change(load_file(path / "model.safetensors")[name])})


def _third_bit(bitmask: torch.Tensor) -> torch.Tensor:
    bitmask[5, 1] |= 0b0111
    return bitmask


def _three_and_one(bitmask: torch.Tensor) -> torch.Tensor:
    """A violating pair of groups: four bits a byte are right in sum."""
    bitmask[5, 1] = 0b0001_0111
    return bitmask


@pytest.mark.parametrize(
    ("part", "change", "words"),
    [
        ("bitmask", _third_bit, r"up\.bitmask: expected two bits set in every group of four.*row 5"),
        ("bitmask", _three_and_one, r"up\.bitmask: expected two bits set in every group of four.*row 5"),
        ("bitmask", lambda b: b[:, :-1].clone(), r"up\.bitmask: expected uint8 \[8, 3\]"),
        ("compressed", lambda v: v[:, :-1].clone(), r"up\.compressed: expected bfloat16 \[8, 12\]"),
        ("shape", lambda s: s * 0 - 4, r"up\.shape: expected sizes of at least 0"),
        (
            "shape",
            lambda s: torch.tensor([[8], [22]]),
            r"up\.shape: expected columns in groups of four, found 22",
        ),
        ("shape", lambda s: None, r"up\.shape: expected this part of the packed weight.*found none"),
    ],
)
def test_faults_of_the_two_of_four_form_are_named(
    part: str, change: Callable[[torch.Tensor], torch.Tensor | None], words: str, tmp_path: Path
) -> None:
    """A claim of 2:4 with one violating group is not 2:4."""
    _break_24(tmp_path, part, change)
    with pytest.raises(CheckpointError, match=words):
        dense_of(tmp_path, "model.layers.0.up.weight", torch.bfloat16)


NESTED = "[" * 200_000


@pytest.mark.parametrize("where", ["config.json", "model.safetensors.index.json", "header"])
def test_json_of_absurd_depth_is_an_error_that_names_the_file(where: str, model: Path) -> None:
    """Python's parser gives up with a RecursionError, which must not reach anybody."""
    if where == "header":
        edit_header(model / "model.safetensors", lambda header: ('{"a": ' + NESTED).encode())
        where = "model.safetensors"
    elif where != "config.json":
        shard_directory(model)
    if where != "model.safetensors":
        (model / where).write_text('{"a": ' + NESTED)
    for read in (load_model, inspect_checkpoint):
        with pytest.raises(CheckpointError, match=rf"{where}: expected .*JSON.*, found brackets nested"):
            read(model)


def test_a_file_that_cannot_be_read_is_named(model: Path) -> None:
    """A directory in place of a file, as a failed mount leaves it."""
    (model / "config.json").unlink()
    (model / "config.json").symlink_to(model / "config.json")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        Checkpoint.open(model)


@pytest.mark.parametrize("ending", ["compressed", "bitmask", "row_offsets"])
def test_a_flipped_bit_is_found_by_its_digest(ending: str, plain: Path, tmp_path: Path) -> None:
    """Files that Lacunar wrote say what was written: no damaged value gets into a model."""
    pack(plain, tmp_path / "packed")
    file = tmp_path / "packed" / "model.safetensors"
    with Checkpoint.open(tmp_path / "packed") as checkpoint:
        entry = checkpoint.entries[f"{UP}.weight"]
        assert isinstance(entry, PackedEntry)
        part = next(part for part in entry.parts if part.name.endswith(ending))
    raw = bytearray(file.read_bytes())
    raw[part.offset + part.nbytes // 2] ^= 1
    file.write_bytes(raw)
    for read in (load_model, inspect_checkpoint):
        with pytest.raises(CheckpointError, match=rf"{UP}\.(bitmask|row_offsets|compressed): expected"):
            read(tmp_path / "packed")


def test_a_digest_that_is_lost_is_an_error(plain: Path, tmp_path: Path) -> None:
    """A flipped bit in its name would leave the tensor unchecked."""
    pack(plain, tmp_path / "packed")

    def rename(header: dict[str, Any]) -> None:
        header["__metadata__"]["sha256;model.norm.weight"] = header["__metadata__"].pop(
            "sha256:model.norm.weight"
        )

    edit_header(tmp_path / "packed" / "model.safetensors", rename)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight: expected a digest of every tensor"):
        Checkpoint.open(tmp_path / "packed")


def test_a_header_that_calls_a_tensor_something_else_is_found_by_its_digest(
    plain: Path, tmp_path: Path
) -> None:
    """The same bytes as another type would load without an error otherwise."""
    pack(plain, tmp_path / "packed")
    edit_header(
        tmp_path / "packed" / "model.safetensors",
        lambda header: header["model.norm.weight"].update(dtype="BF16", shape=[144]),
    )
    with Checkpoint.open(tmp_path / "packed") as checkpoint, pytest.raises(CheckpointError, match="SHA-256"):
        checkpoint.read(checkpoint.entries["model.norm.weight"])


def test_values_outside_of_float16_are_refused(model: Path) -> None:
    """1e5 as float16 is Inf, and a model with an Inf in it says nothing useful."""
    name = "model.norm.weight"
    edit_tensors(model, {name: torch.full((72,), 1e5)})
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight.*float16's range.*100000.*bfloat16"):
        load_model(model, dtype="float16")
    assert load_model(model, dtype="bfloat16").spec.dtype == torch.bfloat16


def test_a_file_that_shrinks_after_opening_is_an_error(model: Path) -> None:
    """Headers are checked once; the read itself still counts its bytes."""
    with Checkpoint.open(model) as checkpoint:
        entry = checkpoint.entries["lm_head.weight"]
        with (model / "model.safetensors").open("r+b") as file:
            file.truncate(64)
        with pytest.raises(CheckpointError, match=r"lm_head\.weight.*truncated"):
            checkpoint.read_into(entry, torch.empty(entry.shape))


@pytest.mark.parametrize("length", [0, -1, 257])
def test_max_model_len_is_held_to_the_model(length: int, plain: Path) -> None:
    """A longer context than the model has positions for would be garbage."""
    with pytest.raises(SettingsError, match=r"max_model_len.*at most 256"):
        load_model(plain, max_model_len=length)


def test_unknown_dtypes_are_refused(plain: Path) -> None:
    """Kernels exist for three."""
    with pytest.raises(SettingsError, match=r"dtype must be one of .*'int8'"):
        load_model(plain, dtype="int8")
