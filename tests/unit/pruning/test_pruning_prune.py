"""Pruning a tiny model from a directory into a directory."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from service.errors import CheckpointError
from service.model.checkpoint import Checkpoint, PackedEntry
from service.pruning import prune as prune_module
from service.pruning.calibration import CalibrationOptions
from service.pruning.methods import prune_weight
from service.pruning.prune import PruneOptions, prune
from service.pruning.writer import work_directory


@pytest.fixture
def options(text: Path) -> Callable[..., PruneOptions]:
    """Options with a calibration of 5 windows of 60 tokens."""

    def make(**values: object) -> PruneOptions:
        calibration = CalibrationOptions(text=text, sequences=5, sequence_tokens=60)
        return PruneOptions(calibration=calibration, **values)  # type: ignore[arg-type]

    return make


def dense_weights(directory: Path) -> dict[str, Tensor]:
    with Checkpoint.open(directory) as checkpoint:
        return {name: checkpoint.read(entry) for name, entry in checkpoint.entries.items()}


def in_a_layer(name: str) -> bool:
    return re.search(r"\.layers\.\d+\..*proj\.weight$", name) is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", ["magnitude", "wanda"])
def test_packed_and_dense_output_hold_identical_weights(
    make_model: Callable[..., Path],
    options: Callable[..., PruneOptions],
    tmp_path: Path,
    dtype: torch.dtype,
    method: str,
) -> None:
    """Both name the same tensors; every linear has its zeros in every row, nothing else changed."""
    source = make_model("llama", dtype=dtype)
    prune(source, tmp_path / "packed", options(method=method, sparsity=0.4, output="packed"))
    prune(source, tmp_path / "dense", options(method=method, sparsity=0.4, output="dense"))

    before, packed, dense = (dense_weights(d) for d in (source, tmp_path / "packed", tmp_path / "dense"))

    assert before.keys() == packed.keys() == dense.keys()
    for name, weight in dense.items():
        assert weight.dtype == dtype
        assert torch.equal(weight, packed[name]), name
        if in_a_layer(name):
            assert (weight == 0).sum(dim=1).unique().tolist() == [int(weight.shape[1] * 0.4)], name
            kept = weight != 0
            assert torch.equal(weight[kept], before[name][kept]), name
        else:
            assert torch.equal(weight, before[name]), name
    assert "quantization_config" not in Checkpoint.open(tmp_path / "dense").config
    assert Checkpoint.open(tmp_path / "packed").config["quantization_config"] == {
        "quant_method": "lacunar",
        "format_version": 1,
        "format": "bitmask",
    }


def test_wanda_equals_a_pass_of_transformers_over_the_pruned_layers_before(
    make_model: Callable[..., Path], options: Callable[..., PruneOptions], tmp_path: Path, text: Path
) -> None:
    """The reference runs the whole model for every layer: earlier ones pruned, this and later ones dense."""
    source = make_model("llama")
    prune(source, tmp_path / "out", options(sparsity=0.5, output="dense"))
    ids = AutoTokenizer.from_pretrained(source)(text.read_text("utf-8"), return_tensors="pt").input_ids
    windows = ids[0, :1200].reshape(20, 60)[[0, 4, 8, 12, 16]]
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    got = dense_weights(tmp_path / "out")
    for layer in range(3):
        linears = {
            name: module
            for name, module in model.model.layers[layer].named_modules()
            if isinstance(module, torch.nn.Linear)
        }
        seen: dict[str, Tensor] = {}
        hooks = [
            module.register_forward_hook(
                lambda _m, args, _out, name=name, seen=seen: seen.update({name: args[0].flatten(0, 1)})
            )
            for name, module in linears.items()
        ]
        with torch.inference_mode():
            model(input_ids=windows)
        for hook in hooks:
            hook.remove()
        for name, module in linears.items():
            want = prune_weight(module.weight.detach(), 0.5, seen[name].double().norm(dim=0))
            with torch.no_grad():
                module.weight.copy_(want)
            same = (got[f"model.layers.{layer}.{name}.weight"] == want).float().mean()
            # Norms summed in another order may swap two weights whose scores are equal but for rounding.
            assert same > 0.999, (layer, name)


def test_the_same_call_writes_the_same_bytes(
    make_model: Callable[..., Path], options: Callable[..., PruneOptions], tmp_path: Path
) -> None:
    """Nothing depends on time, order of a set, or random numbers."""
    source = make_model("llama", dtype=torch.bfloat16)
    for name in ("a", "b"):
        prune(source, tmp_path / name, options())

    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_shards_index_and_side_files_are_kept(
    make_model: Callable[..., Path], options: Callable[..., PruneOptions], tmp_path: Path
) -> None:
    """The index names every tensor that is there, and each weight stays in its shard."""
    source = make_model("llama", max_shard_size="20KB")
    shards = sorted(file.name for file in source.glob("*.safetensors"))
    assert len(shards) > 2
    prune(source, tmp_path / "out", options(method="magnitude"))

    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text("utf-8"))
    held = {shard: set(load_file(tmp_path / "out" / shard)) for shard in shards}
    assert sorted(file.name for file in (tmp_path / "out").glob("*.safetensors")) == shards
    assert {
        shard: {name for name, file in index["weight_map"].items() if file == shard} for shard in shards
    } == held
    assert index["metadata"]["total_size"] == sum(
        t.nbytes for shard in shards for t in load_file(tmp_path / "out" / shard).values()
    )
    expected = {"tokenizer.json", "tokenizer_config.json", "generation_config.json", "LICENSE"}
    for name in expected:
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    assert {f.name for f in (tmp_path / "out").iterdir()} == expected | set(shards) | {
        "config.json",
        "model.safetensors.index.json",
        "pruning.json",
    }


def test_a_sharded_and_a_single_file_are_pruned_alike(
    make_model: Callable[..., Path], options: Callable[..., PruneOptions], tmp_path: Path
) -> None:
    """A layer's tensors may lie in several shards."""
    prune(make_model("llama", "single"), tmp_path / "a", options())
    prune(make_model("llama", "sharded", max_shard_size="20KB"), tmp_path / "b", options())

    a, b = dense_weights(tmp_path / "a"), dense_weights(tmp_path / "b")
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_the_report_says_what_was_asked_and_what_came_out(
    make_model: Callable[..., Path], options: Callable[..., PruneOptions], tmp_path: Path
) -> None:
    """0.3 of 44 is 13.2 and of 52 is 15.6: rows hold 13 and 15 zeros, and that is what is reported."""
    report = prune(make_model("llama", dtype=torch.bfloat16), tmp_path / "out", options(sparsity=0.3))

    q, down = report.layers[0], report.layers[6]
    assert (q.name, q.N, q.K, q.dtype) == ("model.layers.0.self_attn.q_proj", 48, 44, "bfloat16")
    assert q.sparsity == pytest.approx(13 / 44)
    assert (down.name, down.sparsity) == ("model.layers.0.mlp.down_proj", pytest.approx(15 / 52))
    weights = dense_weights(tmp_path / "out")
    zeros = sum(int((weights[f"{layer.name}.weight"] == 0).sum()) for layer in report.layers)
    total = sum(layer.N * layer.K for layer in report.layers)
    assert report.sparsity == pytest.approx(zeros / total)
    assert report.options["sparsity"] == 0.3
    assert report.calibration is not None
    assert report.calibration["sequences"] == 5
    assert json.loads((tmp_path / "out" / "pruning.json").read_text("utf-8")) == report.to_json()


def test_stored_bytes_are_those_on_disk(
    make_model: Callable[..., Path], options: Callable[..., PruneOptions], tmp_path: Path
) -> None:
    """A figure about savings has to be the real one; on disk there is one row offset less than in memory."""
    report = prune(make_model("llama"), tmp_path / "out", options(sparsity=0.7))
    stored = load_file(tmp_path / "out" / "model.safetensors")

    for layer in report.layers:
        on_disk = sum(stored[layer.name + s].nbytes for s in (".compressed", ".bitmask", ".row_offsets"))
        assert layer.format == "bitmap"
        assert layer.stored_bytes == on_disk + 8
        assert layer.dense_bytes == layer.N * layer.K * 4


def test_a_matrix_that_would_grow_stays_dense_with_the_reason(
    make_model: Callable[..., Path], options: Callable[..., PruneOptions], tmp_path: Path
) -> None:
    """At 5 % the bitmap costs more than the zeros save."""
    report = prune(make_model("llama", dtype=torch.bfloat16), tmp_path / "out", options(sparsity=0.05))

    assert {layer.format for layer in report.layers} == {"dense"}
    assert all("packed it would take" in layer.reason for layer in report.layers)
    assert "quantization_config" not in Checkpoint.open(tmp_path / "out").config


def test_skip_leaves_what_it_matches_and_says_so(
    make_model: Callable[..., Path], options: Callable[..., PruneOptions], tmp_path: Path
) -> None:
    """A regular expression anywhere in the name."""
    source = make_model("llama")
    report = prune(source, tmp_path / "out", options(skip=r"layers\.1\.|down_proj", output="dense"))

    before, after = dense_weights(source), dense_weights(tmp_path / "out")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {n for n in before if in_a_layer(n) and ".layers.1." not in n and "down_proj" not in n}
    assert len(report.left_dense) == 7 + 2
    assert set(report.left_dense.values()) == {r"matches skip 'layers\\.1\\.|down_proj'"}


def test_pruning_a_packed_model_further_keeps_its_zeros(
    make_model: Callable[..., Path], options: Callable[..., PruneOptions], tmp_path: Path
) -> None:
    """A packed directory is as good a source as a dense one, skipped layers included."""
    source = make_model("llama")
    prune(source, tmp_path / "half", options(method="magnitude", sparsity=0.5))
    prune(tmp_path / "half", tmp_path / "more", options(method="magnitude", sparsity=0.75, skip="q_proj"))
    prune(source, tmp_path / "direct", options(method="magnitude", sparsity=0.75, output="dense"))

    half, more, direct = (dense_weights(tmp_path / n) for n in ("half", "more", "direct"))
    assert more.keys() == direct.keys()
    for name in more:
        assert torch.equal(more[name], half[name] if "q_proj" in name else direct[name])


@pytest.mark.parametrize("fails_at", ["write_safetensors", "write_checkpoint"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
@pytest.mark.parametrize("method", ["magnitude", "wanda", "sparsegpt"])
def test_an_interrupted_run_goes_on_and_ends_with_the_same_bytes(
    make_model: Callable[..., Path],
    options: Callable[..., PruneOptions],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    fails_at: str,
    error: type[BaseException],
) -> None:
    """Whatever stopped it: no output appears, finished layers are not done again, nothing is left behind."""
    source = make_model("llama")
    prune(source, tmp_path / "whole", options(method=method))
    before = set(tmp_path.iterdir())
    write = getattr(prune_module, fails_at)
    calls: list[str] = []
    stop = True

    def interrupted(target: object, *args: object, **kwargs: object) -> object:
        calls.append(getattr(target, "name", ""))
        result = write(target, *args, **kwargs)
        # The second layer's weights are written but not yet in place.
        if stop and (fails_at == "write_checkpoint" or calls.count("1.partial") == 1):
            raise error
        return result

    monkeypatch.setattr(prune_module, fails_at, interrupted)
    with pytest.raises(error):
        prune(source, tmp_path / "out", options(method=method))
    assert set(tmp_path.iterdir()) == before | {tmp_path / ".out.unfinished"}
    with pytest.raises(ValueError, match="interrupted run with other options"):
        prune(source, tmp_path / "out", options(method=method, sparsity=0.4))
    stop = False
    calls.clear()
    prune(source, tmp_path / "out", options(method=method))

    assert "0.partial" not in calls
    assert set(tmp_path.iterdir()) == before | {tmp_path / "out"}
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "out" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()
    reports = [json.loads((tmp_path / d / "pruning.json").read_text("utf-8")) for d in ("out", "whole")]
    assert reports[0]["layers"] == reports[1]["layers"]


def test_an_existing_output_is_refused_and_untouched(
    make_model: Callable[..., Path], options: Callable[..., PruneOptions], tmp_path: Path
) -> None:
    """Before any work is done."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("precious", "utf-8")

    with pytest.raises(FileExistsError, match="out exists"):
        prune(make_model("llama"), out, options())
    assert (out / "mine").read_text("utf-8") == "precious"


def test_skipping_everything_is_refused(
    make_model: Callable[..., Path], options: Callable[..., PruneOptions], tmp_path: Path
) -> None:
    """Silently pruning nothing would be the worst answer."""
    with pytest.raises(ValueError, match=r"no linear layer to prune.*layers\.0.*matches skip"):
        prune(make_model("llama"), tmp_path / "out", options(skip="."))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("method", ["magnitude", "wanda", "sparsegpt"])
def test_transposed_layers_lose_weights_of_each_output(
    make_model: Callable[..., Path], options: Callable[..., PruneOptions], tmp_path: Path, method: str
) -> None:
    """GPT-2 stores [in, out]: zeros are counted along the inputs of an output, that is down the columns."""
    source = make_model("gpt2")
    prune(source, tmp_path / "dense", options(method=method, output="dense"))
    prune(source, tmp_path / "packed", options(method=method))
    weights, packed = dense_weights(tmp_path / "dense"), dense_weights(tmp_path / "packed")

    assert all(torch.equal(weights[name], packed[name]) for name in weights)
    for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"):
        weight = weights[f"transformer.h.1.{name}.weight"]
        zeros = (weight == 0).sum(dim=0)
        if method == "sparsegpt":
            assert int(zeros.sum()) == weight.numel() // 2
        else:
            assert zeros.unique().tolist() == [weight.shape[0] // 2]


@pytest.mark.parametrize("method", ["magnitude", "wanda", "sparsegpt"])
def test_a_pattern_holds_in_every_group(
    make_model: Callable[..., Path], options: Callable[..., PruneOptions], tmp_path: Path, method: str
) -> None:
    """2:4 kernels read two values of every four, whatever is there."""
    source = make_model("llama")
    report = prune(source, tmp_path / "out", options(method=method, pattern="2:4", output="dense"))

    for name, weight in dense_weights(tmp_path / "out").items():
        if in_a_layer(name):
            groups = (weight != 0).reshape(weight.shape[0], -1, 4).sum(dim=2)
            assert groups.unique().tolist() == [2], name
    assert report.sparsity == 0.5
    with pytest.raises(ValueError, match=r"44 input features, expected a multiple of 8 for the pattern 4:8"):
        prune(source, tmp_path / "odd", options(pattern="4:8"))


def test_owl_keeps_the_mean_and_tells_layers_apart(
    make_model: Callable[..., Path], options: Callable[..., PruneOptions], tmp_path: Path
) -> None:
    """The report has what every layer was given and what it got."""
    report = prune(make_model("llama"), tmp_path / "out", options(per_layer="owl"))

    assert report.layer_sparsities is not None
    assert len(report.layer_sparsities) == 3
    assert sum(report.layer_sparsities) / 3 == pytest.approx(0.5)
    assert max(report.layer_sparsities) - min(report.layer_sparsities) == pytest.approx(0.16)
    for layer in report.layers:
        given = report.layer_sparsities[int(layer.name.split(".")[2])]
        assert layer.sparsity == pytest.approx(given, abs=1 / layer.K)


def test_two_runs_do_not_share_a_work_directory(
    make_model: Callable[..., Path], options: Callable[..., PruneOptions], tmp_path: Path
) -> None:
    """Each would take the other's layers for its own."""
    source = make_model("llama")
    with (
        work_directory(tmp_path / "out", {}),
        pytest.raises(ValueError, match="another run is making it"),
    ):
        prune(source, tmp_path / "out", options(method="magnitude"))


def test_a_weight_with_nan_is_refused_by_name(
    make_model: Callable[..., Path], options: Callable[..., PruneOptions], tmp_path: Path
) -> None:
    """With the layer it is in."""
    source = make_model("llama")
    model = AutoModelForCausalLM.from_pretrained(source)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = float("nan")
    model.save_pretrained(tmp_path / "nan")

    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.up_proj: the weight holds NaN"):
        prune(tmp_path / "nan", tmp_path / "out", options(method="magnitude"))


def test_progress_runs_from_zero_to_one_in_each_step(
    make_model: Callable[..., Path], options: Callable[..., PruneOptions], tmp_path: Path
) -> None:
    """A bar that jumps back or stops short makes its time left wrong."""
    steps: dict[str, list[float]] = {}
    prune(make_model("llama"), tmp_path / "out", options(), lambda s, f: steps.setdefault(s, []).append(f))

    assert list(steps) == ["prune (wanda, 0.5)", "write"]
    for fractions in steps.values():
        assert fractions == sorted(fractions)
        assert (fractions[0], fractions[-1]) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"method": "random"}, "method is 'random'"),
        ({"sparsity": 50}, "sparsity is 50"),
        ({"pattern": "2-4"}, "pattern is '2-4'"),
        ({"pattern": "4:4"}, "expected fewer non-zeros"),
        ({"pattern": "2:4", "per_layer": "owl"}, "owl needs a sparsity"),
        ({"per_layer": "all"}, "per_layer is 'all'"),
        ({"output": "zip"}, "output is 'zip'"),
        ({"skip": "("}, "not a regular expression"),
    ],
)
def test_impossible_options_are_refused(
    options: Callable[..., PruneOptions], values: dict[str, object], message: str
) -> None:
    """When they are built."""
    with pytest.raises(ValueError, match=message):
        options(**values)


def test_the_packed_form_is_the_one_that_kernels_read(
    make_model: Callable[..., Path], options: Callable[..., PruneOptions], tmp_path: Path
) -> None:
    """Names and shapes as BITMAP.md gives them."""
    prune(make_model("llama"), tmp_path / "out", options())
    stored = load_file(tmp_path / "out" / "model.safetensors")
    module = "model.layers.2.mlp.up_proj"

    assert {name for name in stored if name.startswith(module)} == {
        f"{module}.{part}" for part in ("compressed", "bitmask", "row_offsets", "shape")
    }
    assert stored[f"{module}.shape"].tolist() == [52, 44]
    assert stored[f"{module}.bitmask"].shape == (52, 6)
    assert stored[f"{module}.row_offsets"].tolist() == [22 * n for n in range(52)]
    with Checkpoint.open(tmp_path / "out") as checkpoint:
        entry = checkpoint.entries[f"{module}.weight"]
        assert isinstance(entry, PackedEntry)
        assert checkpoint.read(entry).shape == (52, 44)


@pytest.mark.parametrize("part", ["compressed", "bitmask", "row_offsets", "shape"])
def test_a_packed_weight_without_one_of_its_parts_is_refused(
    make_model: Callable[..., Path], options: Callable[..., PruneOptions], tmp_path: Path, part: str
) -> None:
    """Named; never read as something else."""
    from safetensors.torch import save_file

    prune(make_model("llama"), tmp_path / "out", options())
    file = tmp_path / "out" / "model.safetensors"
    stored = load_file(file)
    del stored[f"model.layers.2.mlp.up_proj.{part}"]
    save_file(stored, file)

    with pytest.raises(CheckpointError, match=rf"up_proj\.{part}: expected this part of .*, found none"):
        Checkpoint.open(tmp_path / "out")
