"""Models on a GPU against transformers on the same pruned weights, and captured steps against single ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from service.engine.decode_graphs import DecodeGraphs
from service.engine.protocol import SamplingParams
from service.engine.scheduler import Chunk
from service.engine.sequence import Sequence
from service.model.loader import load_model
from tests.conformance.tiny_models import (
    FOREIGN,
    NATIVE,
    PagedRun,
    prompt,
    reference_greedy,
    reference_logits,
    save_model,
)

pytestmark = pytest.mark.gpu(capability=(9, 0))

CASES = [(name, "native") for name in NATIVE] + [(name, "transformers") for name in ("llama", *FOREIGN)]


@pytest.mark.parametrize(("name", "implementation"), CASES)
def test_logits_match_transformers(name: str, implementation: Any, tmp_path: Path) -> None:
    """A prompt in chunks that end inside blocks, then single tokens, in float32."""
    model = save_model((NATIVE | FOREIGN)[name](), tmp_path)
    tokens = prompt(23, seed=2)
    run = PagedRun(load_model(tmp_path, device="cuda", implementation=implementation))
    parts = [run.step({"a": tokens[start:end]})["a"] for start, end in ((0, 5), (5, 6), (6, 19))]
    parts += [run.step({"a": [token]})["a"] for token in tokens[19:]]
    want = reference_logits(model.reference, tokens)
    torch.testing.assert_close(torch.cat(parts), want, rtol=0, atol=1e-3)


@pytest.mark.parametrize("name", ["llama_tied_head_dim_18", "qwen3", "mistral_window"])
def test_greedy_text_is_transformers_alone_and_in_a_batch(name: str, tmp_path: Path) -> None:
    """64 tokens on 8 prompts: the same text alone and while 7 others run."""
    model = save_model(NATIVE[name](), tmp_path)
    loaded = load_model(tmp_path, device="cuda")
    prompts = {str(index): prompt(3 + 4 * index, seed=10 + index) for index in range(8)}
    wanted = {key: reference_greedy(model.reference, tokens, 64) for key, tokens in prompts.items()}
    alone = {key: PagedRun(loaded).greedy({key: tokens}, 64)[key] for key, tokens in prompts.items()}
    assert alone == wanted
    assert PagedRun(loaded, num_blocks=8 * 26).greedy(prompts, 64) == wanted


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", list(NATIVE))
def test_half_precision_is_as_good_as_transformers(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Compressed weights, and blocks that attention takes to tensor cores; twice the rounding is allowed."""
    model = save_model(NATIVE[name](), tmp_path, dtype=dtype)
    tokens = prompt(60, seed=7)
    theirs = reference_logits(model.reference, tokens)
    truth = reference_logits(model.reference.float(), tokens)
    loaded = load_model(tmp_path, device="cuda")
    assert "lane_stream" in {report.format for report in loaded.layer_reports()}
    run = PagedRun(loaded, block_size=16)
    parts = [run.step({"a": tokens[start:end]})["a"] for start, end in ((0, 5), (5, 6), (6, 50))]
    parts += [run.step({"a": [token]})["a"] for token in tokens[50:]]
    allowed = 2 * float((theirs - truth).abs().max()) + 1e-3
    assert float((torch.cat(parts) - truth).abs().max()) <= allowed


def test_weights_are_stored_once(tmp_path: Path) -> None:
    """A packed layer's report counts what it really holds; a dense copy is nowhere."""
    save_model(NATIVE["llama"](), tmp_path, dtype=torch.bfloat16)
    dense = load_model(tmp_path, device="cuda", weights="dense")
    packed = load_model(tmp_path, device="cuda")
    tokens = prompt(12, seed=8)
    assert {report.format for report in dense.layer_reports()} == {"dense"}
    got, want = (PagedRun(model).step({"a": tokens})["a"] for model in (packed, dense))
    assert float((got - want).abs().max()) <= 0.1 * float(want.abs().max())


@pytest.mark.parametrize("batch", [1, 2, 3, 5])
def test_captured_steps_equal_single_ones(batch: int, tmp_path: Path) -> None:
    """Also with rows that pad the captured batch; over several steps, with another batch between them."""
    save_model(NATIVE["qwen3"](), tmp_path, dtype=torch.bfloat16)
    model = load_model(tmp_path, device="cuda")
    block_size, blocks = 16, 40
    run = PagedRun(model, block_size=block_size, num_blocks=blocks)
    prompts = {str(i): prompt(5 + 9 * i, seed=i) for i in range(batch)}
    run.step(prompts)
    before = ([k.clone() for k in run.cache.keys], [v.clone() for v in run.cache.values])
    lengths = dict(run.lengths)
    following = {name: [7 + int(name)] for name in prompts}
    want = list(run.step(following).values())
    tables = {name: list(table) for name, table in run.tables.items()}
    for cache, saved in zip((run.cache.keys, run.cache.values), before, strict=True):
        for tensor, old in zip(cache, saved, strict=True):
            tensor.copy_(old)

    graphs = DecodeGraphs(
        model,
        run.cache,
        max_sequences=5,
        max_blocks=16,
        scratch_block=run.free[0],
        progress=lambda share: None,
    )
    chunks = []
    for name in prompts:
        sequence = Sequence(name, [*prompts[name], 7 + int(name)], SamplingParams(max_tokens=9))
        sequence.blocks = np.array(tables[name], dtype=np.int32)
        sequence.num_blocks = len(tables[name])
        chunks.append(Chunk(sequence, lengths[name], 1))
    calls = sum(model.linear_calls().values())
    first = graphs.run(chunks).cpu()
    layers = len(list(model.layer_reports()))
    assert sum(model.linear_calls().values()) == calls + layers, "a replayed step counts as one that ran"
    other = graphs.run(chunks[:1]).cpu()
    again = graphs.run(chunks).cpu()

    assert torch.equal(first, again)
    allowed = 0.02 * float(first.abs().max())  # padding may choose another split of the same sums
    assert float((first - torch.cat(want)).abs().max()) <= allowed
    assert float((other - want[0]).abs().max()) <= allowed


def test_launched_steps_take_their_tokens_from_the_step_before(tmp_path: Path) -> None:
    """16 tokens on 3 prompts, each step launched before the last one's tokens are read: the greedy text of
    transformers, also when a sequence leaves and the rows change."""
    model = save_model(NATIVE["qwen3"](), tmp_path)
    loaded = load_model(tmp_path, device="cuda")
    run = PagedRun(loaded, block_size=16, num_blocks=40)
    prompts = {str(i): prompt(5 + 9 * i, seed=i) for i in range(3)}
    wanted = {name: reference_greedy(model.reference, tokens, 16) for name, tokens in prompts.items()}
    first = {name: int(logits[-1].argmax()) for name, logits in run.step(prompts).items()}
    graphs = DecodeGraphs(
        loaded,
        run.cache,
        max_sequences=5,
        max_blocks=16,
        scratch_block=run.free.pop(),
        progress=lambda share: None,
    )
    sequences = {}
    for name, tokens in prompts.items():
        sequence = Sequence(name, [*tokens, first[name]], SamplingParams(max_tokens=16))
        table = [*run.tables[name], *(run.free.pop() for _ in range(2))]
        sequence.blocks, sequence.num_blocks = np.array(table, dtype=np.int32), len(table)
        sequences[name] = sequence
    got = {name: [token] for name, token in first.items()}
    order, sources = list(prompts), None
    pending = None
    for step in range(15):
        chunks = [Chunk(sequences[name], len(prompts[name]) + step, 1) for name in order]
        launched = (order, graphs.launch(chunks, sources))
        if pending is not None:
            for name, token in zip(pending[0], pending[1].wait(), strict=True):
                got[name].append(token)
        pending = launched
        following = [name for name in reversed(order) if step < 7 or name != "1"]
        sources = [order.index(name) for name in following]
        order = following
    assert pending is not None
    for name, token in zip(pending[0], pending[1].wait(), strict=True):
        got[name].append(token)
    assert {name: tokens[: len(got[name])] for name, tokens in wanted.items()} == got
    assert len(got["0"]) == 16
