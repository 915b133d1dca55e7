"""Both forward codes against transformers on the same pruned weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from service.model.loader import load_model
from tests.conformance.tiny_models import (
    FOREIGN,
    NATIVE,
    PagedRun,
    SavedModel,
    prompt,
    reference_greedy,
    reference_logits,
    save_model,
)

# float32 sums in another order: far below the 1e-3 that is promised.
TOLERANCE = 1e-4

CASES = [(name, "native") for name in NATIVE] + [(name, "transformers") for name in (*NATIVE, *FOREIGN)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Models by name, made on first use."""
    made: dict[str, SavedModel] = {}

    def get(name: str) -> SavedModel:
        if name not in made:
            made[name] = save_model((NATIVE | FOREIGN)[name](), tmp_path_factory.mktemp(name))
        return made[name]

    return get


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]}-{case[1]}", scope="module")
def case(request: pytest.FixtureRequest, saved: Any) -> Any:
    """A loaded model and its reference."""
    name, implementation = request.param
    model = saved(name)
    loaded = load_model(model.path, implementation=implementation)
    assert loaded.spec.implementation == implementation
    return loaded, model.reference


def test_prefill_matches_transformers(case: Any) -> None:
    """One prompt in one step: every token's logits."""
    model, reference = case
    tokens = prompt(23, seed=1)
    got = PagedRun(model).step({"a": tokens})["a"]
    torch.testing.assert_close(got, reference_logits(reference, tokens), rtol=0, atol=TOLERANCE)


def test_chunked_prefill_then_decode_matches_transformers(case: Any) -> None:
    """Chunks that end inside blocks, then single tokens: the cache must hold what one pass would see."""
    model, reference = case
    tokens = prompt(23, seed=2)
    run = PagedRun(model)
    parts = [run.step({"a": tokens[start:end]})["a"] for start, end in ((0, 5), (5, 6), (6, 19))]
    parts += [run.step({"a": [token]})["a"] for token in tokens[19:]]
    torch.testing.assert_close(torch.cat(parts), reference_logits(reference, tokens), rtol=0, atol=TOLERANCE)


def test_mixed_batch_matches_transformers(case: Any) -> None:
    """Sequences of other lengths, prefill beside decode, must not leak into each other."""
    model, reference = case
    prompts = {"a": prompt(17, seed=3), "b": prompt(3, seed=4), "c": prompt(31, seed=5)}
    run = PagedRun(model)
    parts = {name: [] for name in prompts}
    for step in (
        {"a": (0, 17), "b": (0, 2)},
        {"b": (2, 3), "c": (0, 12)},
        {"c": (12, 31)},
    ):
        logits = run.step({name: prompts[name][start:end] for name, (start, end) in step.items()})
        for name, rows in logits.items():
            parts[name].append(rows)
    for name, tokens in prompts.items():
        torch.testing.assert_close(
            torch.cat(parts[name]), reference_logits(reference, tokens), rtol=0, atol=TOLERANCE
        )


def test_only_the_wanted_logits_are_returned(case: Any) -> None:
    """A step may want none (a prefill chunk) or the last of each sequence."""
    model, reference = case
    tokens = prompt(9, seed=6)
    got = PagedRun(model).step({"a": tokens}, last_only=True)["a"]
    assert got.shape == (1, model.spec.vocab_size)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, reference_logits(reference, tokens)[-1:], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("name", "implementation"),
    [("llama_tied_head_dim_18", "native"), ("qwen3", "native"), ("gpt2", "transformers")],
)
def test_greedy_text_is_transformers_alone_and_in_a_batch(name: str, implementation: str, saved: Any) -> None:
    """64 tokens on 8 prompts: the same text alone and while 7 others run."""
    model = saved(name)
    loaded = load_model(model.path, implementation=implementation)
    prompts = {str(index): prompt(3 + 4 * index, seed=10 + index) for index in range(8)}
    wanted = {key: reference_greedy(model.reference, tokens, 64) for key, tokens in prompts.items()}
    alone = {key: PagedRun(loaded).greedy({key: tokens}, 64)[key] for key, tokens in prompts.items()}
    together = PagedRun(loaded, num_blocks=8 * 26).greedy(prompts, 64)
    assert alone == wanted
    assert together == wanted


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral_window"])
def test_half_precision_is_as_good_as_transformers(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Against the same weights run in float32, our rounding may be twice transformers' own."""
    model = save_model(NATIVE[name](), tmp_path, dtype=dtype)
    tokens = prompt(23, seed=7)
    theirs = reference_logits(model.reference, tokens)
    truth = reference_logits(model.reference.float(), tokens)
    got = PagedRun(load_model(tmp_path)).step({"a": tokens})["a"]
    allowed = 2 * float((theirs - truth).abs().max()) + 1e-3
    assert float((got - truth).abs().max()) <= allowed


@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_dense_and_packed_weights_give_the_same_logits(implementation: Any, saved: Any) -> None:
    """`weights="dense"` keeps every layer dense and changes nothing else."""
    model = saved("llama_biases")
    tokens = prompt(12, seed=8)
    packed = load_model(model.path, implementation=implementation)
    dense = load_model(model.path, implementation=implementation, weights="dense")
    assert {report.format for report in dense.layer_reports()} == {"dense"}
    assert "bitmap" in {report.format for report in packed.layer_reports()}
    torch.testing.assert_close(
        PagedRun(packed).step({"a": tokens})["a"],
        PagedRun(dense).step({"a": tokens})["a"],
        rtol=0,
        atol=TOLERANCE,
    )
