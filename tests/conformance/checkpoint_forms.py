"""Every stored form on every tiny architecture, every edge matrix, and thousands of corruptions.

    python -m tests.conformance.checkpoint_forms [--corruptions 10000] [--write docs/checkpoints.md]

Prints the tables of docs/checkpoints.md. A quick part of it runs in the ordinary test suite
(test_checkpoint_forms.py).
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import service.model  # noqa: F401 - registers the quantizer
from kernels_ext import bitmap_linear, bitmap_pack, bitmap_unpack
from kernels_ext.ops import available_isas
from service.errors import CheckpointError
from service.model.checkpoint import Checkpoint
from service.model.loader import load_model
from service.pruning.methods import Pattern, prune_weight
from service.pruning.pack import pack, unpack
from tests.conformance.tiny_models import (
    FOREIGN,
    NATIVE,
    PagedRun,
    prompt,
    reference_logits,
    save_model,
)
from tests.unit.model.checkpoint_files import edit_config, pack_matrix, shard_directory

EDGES = Path(__file__).parents[1] / "data" / "edge_matrices.safetensors"

MODELS: dict[str, Callable[[], Any]] = {
    name: (NATIVE | FOREIGN)[name]
    for name in (
        "llama",
        "llama_tied_head_dim_18",
        "llama_biases",
        "mistral_window",
        "qwen2",
        "qwen3",
        "phi3_fused",
        "gemma_scaled_embedding",
        "opt",
        "gpt2",
        "gpt_neox_partial_rotary",
        "mixtral",
        "qwen3_moe",
    )
}

Tensors = dict[str, Tensor]


def _is_matrix(name: str, tensor: Tensor) -> bool:
    return tensor.dim() == 2 and name.endswith(".weight")


def _pack_24(dense: Tensor) -> Tensors:
    """Two of every four: the non-zeros, filled up with zeros of lower columns."""
    N, K = dense.shape
    groups = (dense != 0).reshape(N, K // 4, 4)
    keep = groups.float().argsort(dim=2, descending=True, stable=True)[:, :, :2]
    mask = torch.zeros_like(groups).scatter_(2, keep, True).view(N, K)
    parts = pack_matrix(mask.to(torch.float32))
    return {
        "compressed": dense[mask].view(N, K // 2),
        "bitmask": parts["bitmask"],
        "shape": torch.tensor([[N], [K]]),
    }


def _bitmask_old(tensors: Tensors) -> Tensors:
    out: Tensors = {}
    for name, tensor in tensors.items():
        if tensor.dim() in (1, 2) and tensor.is_floating_point() and name.endswith((".weight", ".bias")):
            out |= {f"{name}.{part}": value for part, value in pack_matrix(tensor).items()}
        else:
            out[name] = tensor
    return out


def _bitmask_new(tensors: Tensors) -> Tensors:
    out: Tensors = {}
    for name, tensor in tensors.items():
        if tensor.dim() in (1, 2) and tensor.is_floating_point() and name.endswith(".weight"):
            module = name.removesuffix(".weight")
            out |= {f"{module}.{part}": value for part, value in pack_matrix(tensor).items()}
        else:
            out[name] = tensor
    return out


def _two_of_four(tensors: Tensors) -> Tensors:
    out: Tensors = {}
    for name, tensor in tensors.items():
        if _is_matrix(name, tensor) and tensor.shape[1] % 4 == 0 and _fits_24(tensor):
            module = name.removesuffix(".weight")
            out |= {f"{module}.{part}": value for part, value in _pack_24(tensor).items()}
        else:
            out[name] = tensor
    return out


def _fits_24(tensor: Tensor) -> bool:
    return bool(((tensor != 0).reshape(tensor.shape[0], -1, 4).sum(dim=2) <= 2).all())


def _masked(tensors: Tensors) -> Tensors:
    out: Tensors = {}
    for name, tensor in tensors.items():
        if _is_matrix(name, tensor):
            mask = tensor != 0
            out[f"{name}_orig"] = torch.where(mask, tensor, torch.full_like(tensor, -0.3))
            out[f"{name}_mask"] = mask.to(tensor.dtype)
        else:
            out[name] = tensor
    return out


def _cast(dtype: torch.dtype) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()
    }


CT = "compressed-tensors"
CLAIMS: dict[str, dict[str, Any]] = {
    "sparse-bitmask, <= 0.8.1": {"compression_config": {"sparsity_config": {"format": "sparse-bitmask"}}},
    "sparse-bitmask, >= 0.9.4": {
        "quantization_config": {
            "quant_method": CT,
            "config_groups": {},
            "sparsity_config": {"format": "sparse-bitmask"},
        }
    },
    "sparse-24-bitmask": {
        "quantization_config": {"quant_method": CT, "sparsity_config": {"format": "sparse-24-bitmask"}}
    },
    "plain with `format: dense`": {"compression_config": {"sparsity_config": {"format": "dense"}}},
}
# Tensors in, tensors out; the dense source of 16-bit forms is their own rounding.
FORMS: dict[str, Callable[[Tensors], Tensors]] = {
    "plain float32": dict,
    "plain bfloat16": _cast(torch.bfloat16),
    "plain float16": _cast(torch.float16),
    "plain with `format: dense`": dict,
    "sharded": dict,
    "sparse-bitmask, <= 0.8.1": _bitmask_old,
    "sparse-bitmask, >= 0.9.4": _bitmask_new,
    "sparse-24-bitmask": _two_of_four,
    "weight_orig and weight_mask": _masked,
}
OURS = ("packed", "packed, sharded")


def write_form(source: Path, out: Path, form: str) -> None:
    """Write a saved model in another form."""
    if form in OURS:
        plain = source
        if form.endswith("sharded"):
            plain = out.with_name(f"{out.name}-shards")
            shutil.copytree(source, plain)
            shard_directory(plain)
        pack(plain, out)
        return
    shutil.copytree(source, out)
    tensors = FORMS[form](load_file(source / "model.safetensors"))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, out / "model.safetensors")
    edit_config(out, **CLAIMS.get(form, {}))
    if form == "sharded":
        shard_directory(out)


def save_source(name: str, path: Path, *, pattern: bool = True) -> Any:
    """Save a tiny model whose layers are 2:4 where their sizes allow it; returns transformers' model."""
    saved = save_model(MODELS[name](), path)
    tensors = load_file(path / "model.safetensors")
    for key, tensor in tensors.items():
        if pattern and _is_matrix(key, tensor) and tensor.shape[1] % 4 == 0 and ".0." in f".{key}":
            tensors[key] = prune_weight(tensor, Pattern(2, 4))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    del saved
    return reference(path)


def reference(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' own reading of a directory."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager").eval()


@dataclass(frozen=True)
class Row:
    """One form of one model: whether transformers gets the source's logits exactly, and ours against it."""

    form: str
    model: str
    exact: bool
    served_difference: float
    as_plain: bool


def check_form(name: str, form: str, root: Path, source: Path) -> Row:
    """Compare a form with its dense source."""
    directory = root / f"{name}-{len(list(root.iterdir()))}"
    write_form(source, directory, form)
    tokens = prompt(13, seed=5)
    dense = source
    if form in ("plain bfloat16", "plain float16"):
        dense = directory
    want = reference_logits(reference(dense), tokens)
    packed = directory
    if form not in OURS:
        packed = root / f"{directory.name}-packed"
        pack(directory, packed)
    exact = torch.equal(reference_logits(reference(packed), tokens), want)
    served = PagedRun(load_model(directory, dtype="float32")).step({"a": tokens})["a"]
    plain = PagedRun(load_model(dense, dtype="float32")).step({"a": tokens})["a"]
    return Row(form, name, exact, float((served - want).abs().max()), torch.equal(served, plain))


# --- edge matrices ---


def bits(tensor: Tensor) -> Tensor:
    """The bytes: equal for NaN and unequal for zeros of different sign."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def check_edges(root: Path) -> dict[str, dict[str, bool]]:
    """Matrix -> check -> whether every bit came back (with the sign of zeros where that is kept)."""
    result: dict[str, dict[str, bool]] = {}
    for name, dense in load_file(EDGES).items():
        checks = result[name] = {}
        normal = dense.masked_fill(dense == 0, 0.0)
        for isa in available_isas():
            packed = bitmap_pack(dense, isa=isa)
            checks[f"bitmap, {isa}"] = torch.equal(bits(bitmap_unpack(packed, isa=isa)), bits(dense))
            if bool(torch.isfinite(dense).all()):
                # One-hot inputs: each product is one weight, exactly. -0.0 plus 0.0 is 0.0.
                eye = torch.eye(dense.shape[1], dtype=dense.dtype)
                y = bitmap_linear(eye, packed, isa=isa)
                checks[f"bitmap linear, {isa}"] = torch.equal(y.T, dense)
        for form, write, want in (
            ("packed on disk", lambda a, b: pack(a, b), normal),
            ("packed on disk, -0.0 kept", lambda a, b: pack(a, b, keep_negative_zeros=True), dense),
        ):
            checks[form] = _disk_round_trip(root / f"{name}-{len(checks)}", dense, write, want)
        for form, make in (
            ("sparse-bitmask", _bitmask_new),
            ("sparse-24-bitmask", _two_of_four),
            ("weight_orig and weight_mask", _masked),
        ):
            if form == "sparse-24-bitmask" and (dense.shape[1] % 4 or not _fits_24(dense)):
                continue
            path = root / f"{name}-{len(checks)}"
            path.mkdir()
            save_file(make({"layers.0.m.weight": dense}), path / "model.safetensors")
            (path / "config.json").write_text("{}")
            with Checkpoint.open(path) as checkpoint:
                got = checkpoint.read(checkpoint.entries["layers.0.m.weight"])
            # These forms have no place for the sign of a zero; 2:4 may store it.
            checks[form] = torch.equal(bits(got.masked_fill(got == 0, 0.0)), bits(normal))
    return result


def _disk_round_trip(path: Path, dense: Tensor, write: Any, want: Tensor) -> bool:
    path.mkdir()
    save_file({"layers.0.m.weight": dense}, path / "model.safetensors")
    (path / "config.json").write_text("{}")
    try:
        write(path, path.with_name(path.name + "-packed"))
    except ValueError as error:
        # Nothing to gain: the matrix stays plain, and the message says so.
        return "get smaller by packing" in str(error)
    unpack(path.with_name(path.name + "-packed"), path.with_name(path.name + "-again"))
    again = load_file(path.with_name(path.name + "-again") / "model.safetensors")["layers.0.m.weight"]
    return torch.equal(bits(again), bits(want))


# --- corruptions ---


@dataclass
class Fuzz:
    """Small checkpoints in every form, and what became of corrupted copies."""

    root: Path
    originals: dict[str, Tensors] = field(default_factory=dict)
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        tensors: Tensors = {"model.norm.weight": torch.rand(24, generator=generator)}
        for layer in range(2):
            weight = torch.randn(10, 24, generator=generator)
            tensors[f"model.layers.{layer}.m.weight"] = prune_weight(weight, Pattern(2, 4))
        source = self.root / "source"
        source.mkdir()
        save_file(tensors, source / "model.safetensors")
        (source / "config.json").write_text(json.dumps({"model_type": "llama"}))
        for form in (*FORMS, *OURS):
            path = self.root / form.replace(" ", "_").replace("`", "")
            write_form(source, path, form)
            self.originals[path.name] = self.read(path)

    @staticmethod
    def read(path: Path) -> Tensors:
        """Every tensor, as a load would read it."""
        with Checkpoint.open(path) as checkpoint:
            return {name: checkpoint.read(entry) for name, entry in checkpoint.entries.items()}

    def corrupt(self, form: str, file_index: int, how: str, places: list[float], value: int) -> None:
        """Break a copy of one form: the reader must give an error that names a file, or the same tensors."""
        copy = self.root / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(self.root / form, copy)
        files = sorted(file for file in copy.iterdir() if file.suffix in (".safetensors", ".json"))
        file = files[file_index % len(files)]
        raw = bytearray(file.read_bytes())
        data_from = 8 + int.from_bytes(raw[:8], "little") if file.suffix == ".safetensors" else len(raw)
        in_data = False
        if how == "remove":
            file.unlink()
        elif how == "truncate":
            file.write_bytes(raw[: int(places[0] * len(raw))])
        elif how == "insert":
            at = int(places[0] * len(raw))
            file.write_bytes(raw[:at] + bytes([value]) + raw[at:])
        elif how == "header" and file.suffix == ".safetensors":
            header = json.loads(raw[8:data_from])
            names = [name for name in header if name != "__metadata__"]
            entry = header[names[int(places[0] * len(names))]]
            key = ("dtype", "shape", "data_offsets")[value % 3]
            if key == "dtype":
                entry[key] = ("F32", "F16", "BF16", "I64", "U8", "F8_E4M3", "F64", "X")[value % 8]
            else:
                entry[key] = [size + (value % 7) - 3 for size in entry[key]]
            text = json.dumps(header).encode()
            file.write_bytes(len(text).to_bytes(8, "little") + text + raw[data_from:])
        else:
            for place in places:
                at = int(place * len(raw))
                in_data |= at >= data_from
                raw[at] ^= 1 << value % 8 if how == "flip" else value % 255 + 1
            file.write_bytes(raw)
        try:
            got = self.read(copy)
        except CheckpointError as error:
            if str(copy) not in str(error):
                raise AssertionError(f"no file is named in: {error}") from error
            self.outcomes[form, "refused"] += 1
            return
        want = self.originals[form]
        same = got.keys() == want.keys() and all(
            got[name].dtype == want[name].dtype and torch.equal(bits(got[name]), bits(want[name]))
            for name in want
        )
        if same:
            self.outcomes[form, "harmless"] += 1
            return
        # Without a digest other values are values. Ours has digests: nothing else may come out of it.
        assert not form.startswith("packed"), f"{form} silently wrong after {how} of {file.name}"
        if in_data:
            self.outcomes[form, "other values (no digest)"] += 1
            return
        # A renamed tensor or a changed type: a model is held to its configuration by `find`.
        renamed = got.keys() != want.keys() or any(
            got[name].dtype != want[name].dtype or got[name].shape != want[name].shape for name in want
        )
        assert renamed or how in ("flip", "bytes", "header"), (
            f"{form} silently wrong after {how} of {file.name}"
        )
        self.outcomes[form, "other names, types or values (no digest)"] += 1


def run_corruptions(root: Path, examples: int) -> Counter[tuple[str, str]]:
    """Run so many random corruptions; raises at the first that is neither refused nor harmless."""
    fuzz = Fuzz(root)

    @seed(7)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(
        form=st.sampled_from(sorted(fuzz.originals)),
        file_index=st.integers(0, 3),
        how=st.sampled_from(["flip", "flip", "bytes", "truncate", "insert", "header", "header", "remove"]),
        places=st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=3),
        value=st.integers(0, 255),
    )
    def once(form: str, file_index: int, how: str, places: list[float], value: int) -> None:
        fuzz.corrupt(form, file_index, how, places, value)

    once()
    return fuzz.outcomes


# --- the page ---


def main() -> int:
    """Run everything and print, or write, the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--corruptions", type=int, default=10_000)
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    lines: list[str] = []
    failed = 0
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        rows: list[Row] = []
        for model in MODELS:
            (root / model).mkdir()
            source = root / model / "source"
            save_source(model, source)
            for form in (*FORMS, *OURS):
                rows.append(check_form(model, form, root / model, source))
                print(rows[-1], file=sys.stderr, flush=True)
        lines += ["| form | " + " | ".join(MODELS) + " |", "|---" * (len(MODELS) + 1) + "|"]
        for form in (*FORMS, *OURS):
            cells = []
            for model in MODELS:
                row = next(row for row in rows if (row.form, row.model) == (form, model))
                good = row.exact and row.as_plain and row.served_difference < 1e-4
                failed += not good
                cells.append(f"exact, {row.served_difference:.0e}" if good else "**wrong**")
            lines.append(f"| {form} | " + " | ".join(cells) + " |")
        (root / "edges").mkdir()
        edges = check_edges(root / "edges")
        columns = sorted({check for checks in edges.values() for check in checks})
        lines += ["", "| matrix | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
        for matrix, checks in edges.items():
            failed += sum(not good for good in checks.values())
            cells = ["" if c not in checks else "exact" if checks[c] else "**wrong**" for c in columns]
            lines.append(f"| {matrix} | " + " | ".join(cells) + " |")
        (root / "fuzz").mkdir()
        outcomes = run_corruptions(root / "fuzz", arguments.corruptions)
        kinds = sorted({kind for _, kind in outcomes})
        lines += ["", "| corrupted form | " + " | ".join(kinds) + " |", "|---" * (len(kinds) + 1) + "|"]
        for form in sorted({form for form, _ in outcomes}):
            lines.append(f"| {form} | " + " | ".join(str(outcomes[form, kind]) for kind in kinds) + " |")
    text = "\n".join(lines) + "\n"
    print(text)
    if arguments.write is not None:
        page = arguments.write.read_text(encoding="utf-8")
        begin, end = "<!-- tables -->\n", "<!-- end of tables -->"
        head, rest = page.split(begin)
        arguments.write.write_text(
            head + begin + "\n" + text + "\n" + end + rest.split(end)[1], encoding="utf-8"
        )
    print(f"{failed} of the cells are wrong", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
