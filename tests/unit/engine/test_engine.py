"""Client and engine process end to end, with a model that shows every wrong slot of the KV cache."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import fake_model
import psutil
import pytest
import pytest_asyncio
from fake_model import reference_greedy, reference_logits

from service.engine.client import EngineClient
from service.engine.config import EngineConfig
from service.engine.protocol import EngineStats, LoadProgress, RequestOutput, SamplingParams
from service.errors import (
    CheckpointError,
    ContextLengthExceeded,
    EngineUnavailable,
    InvalidRequest,
    QueueFull,
    SettingsError,
    StartupError,
)

FOREVER = SamplingParams(max_tokens=fake_model.MAX_MODEL_LEN, temperature=0.0, ignore_eos=True)


def config(**changes: Any) -> EngineConfig:
    defaults: dict[str, Any] = {
        "model": "fake",
        "model_factory": f"{fake_model.__name__}:load",
        "max_num_sequences": 4,
        "max_step_tokens": 16,
        "max_queue": 4,
        "kv_block_size": 4,
        "threads": 1,
        "seed": 1,
    }
    return EngineConfig(**(defaults | changes))


@contextlib.asynccontextmanager
async def engine(**changes: Any) -> AsyncIterator[EngineClient]:
    client = await EngineClient.start(config(**changes))
    try:
        yield client
    finally:
        await client.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[EngineClient]:
    """One engine for the tests that leave it as they found it."""
    async with engine() as client:
        yield client


pytestmark = pytest.mark.asyncio(loop_scope="module")


_ids = itertools.count()


async def collect(client: EngineClient, prompt: list[int], sampling: SamplingParams) -> list[RequestOutput]:
    stream = client.generate(f"collect-{next(_ids)}", prompt, sampling)
    return [output async for output in stream]


def tokens_of(outputs: list[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def greedy(count: int, **changes: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": count, "temperature": 0.0, "ignore_eos": True} | changes))


class StatsWatch:
    """Waits until the engine's state satisfies a condition."""

    def __init__(self, client: EngineClient) -> None:
        self._changed = asyncio.Event()
        self._client = client
        client.on_stats = self.seen

    def seen(self, stats: EngineStats) -> None:
        self._changed.set()

    async def until(self, condition: Callable[[EngineStats], bool]) -> EngineStats:
        while not condition(self._client.stats):
            self._changed.clear()
            await asyncio.wait_for(self._changed.wait(), 30)
        return self._client.stats


async def test_engine_describes_itself(shared: EngineClient) -> None:
    info = shared.info
    assert (info.architecture, info.vocab_size, info.max_model_len) == ("Fake", 64, 8192)
    # As many blocks as max_num_sequences sequences of max_model_len need: 4 * 8192 / 4.
    assert info.num_kv_blocks == 8192
    assert info.layers[0].name == "layer"
    assert info.dense_bytes == 16384
    assert shared.alive


# 3, 4, 5: around a block. 15, 16, 17: around a step. 100: many chunks.
@pytest.mark.parametrize("length", [1, 3, 4, 5, 15, 16, 17, 100])
async def test_greedy_matches_reference(shared: EngineClient, length: int) -> None:
    prompt = [(7 * i + length) % 59 for i in range(length)]
    outputs = await collect(shared, prompt, greedy(20))
    assert tokens_of(outputs) == reference_greedy(prompt, 20)
    assert [output.finish_reason for output in outputs] == [None] * 19 + ["length"]
    assert outputs[0].queue_seconds is not None
    assert outputs[0].prefill_seconds is not None
    assert outputs[1].queue_seconds is None


async def test_neighbours_change_nothing(shared: EngineClient) -> None:
    """More sequences than run at once, of all kinds; each gives what it gives alone."""
    kinds = [
        greedy(12),
        SamplingParams(max_tokens=12, seed=5, ignore_eos=True),
        SamplingParams(max_tokens=12, seed=5, top_p=0.8, temperature=1.3, ignore_eos=True),
        SamplingParams(max_tokens=12, seed=6, top_k=7, repetition_penalty=1.3, ignore_eos=True),
        greedy(12, frequency_penalty=1.5, logprobs=3),
        SamplingParams(max_tokens=12, seed=-6, min_p=0.1, logit_bias={3: 2.0}, ignore_eos=True),
        greedy(12, prompt_logprobs=2),
        SamplingParams(max_tokens=12, ignore_eos=True),
    ]
    prompts = [[(5 * i + kind) % 59 for i in range(3 + 6 * kind)] for kind in range(len(kinds))]
    alone = [await collect(shared, prompt, kind) for prompt, kind in zip(prompts, kinds, strict=True)]
    together = await asyncio.gather(
        *(collect(shared, prompt, kind) for prompt, kind in zip(prompts, kinds, strict=True))
    )
    seeded = len(kinds) - 1  # the last has no seed, so it only has to finish
    assert [tokens_of(o) for o in together[:seeded]] == [tokens_of(o) for o in alone[:seeded]]
    assert [o[0].prompt_logprobs for o in together] == [o[0].prompt_logprobs for o in alone]
    assert len(tokens_of(together[seeded])) == 12


async def test_end_of_sequence_stops(shared: EngineClient) -> None:
    prompt = [9, 4]
    want = reference_greedy(prompt, 500, stops=(fake_model.EOS,))
    assert want[-1] == fake_model.EOS, "the prompt must lead to the end for this test"
    outputs = await collect(shared, prompt, SamplingParams(max_tokens=500, temperature=0.0))
    assert tokens_of(outputs) == want
    assert outputs[-1].finish_reason == "stop"
    assert outputs[-1].stop_token_id == fake_model.EOS


async def test_stop_token_ids_stop(shared: EngineClient) -> None:
    prompt = [1, 2, 3]
    free = reference_greedy(prompt, 10)
    stop = free[4]
    outputs = await collect(shared, prompt, greedy(10, stop_token_ids=(stop,)))
    assert tokens_of(outputs) == free[: free.index(stop) + 1]
    assert (outputs[-1].finish_reason, outputs[-1].stop_token_id) == ("stop", stop)


async def test_min_tokens_masks_stop_tokens(shared: EngineClient) -> None:
    prompt = [1, 2, 3]
    stop = reference_greedy(prompt, 1)[0]
    outputs = await collect(shared, prompt, greedy(40, stop_token_ids=(stop,), min_tokens=6))
    tokens = tokens_of(outputs)
    assert stop not in tokens[:6]
    assert len(tokens) >= 7


async def test_prompt_of_max_model_len_minus_one_gives_one_token() -> None:
    async with engine(max_model_len=16) as client:
        outputs = await collect(client, [2] * 15, greedy(5))
        assert len(tokens_of(outputs)) == 1
        assert outputs[-1].finish_reason == "length"
        with pytest.raises(ContextLengthExceeded, match="16 tokens") as caught:
            client.generate("long", [2] * 16, greedy(5))
        assert caught.value.param == "prompt"
        assert client.slots_free == 8


async def test_logprobs_are_of_the_raw_distribution(shared: EngineClient) -> None:
    prompt = [3, 1, 4, 1, 5]
    sampling = greedy(4, logprobs=5, logit_bias={11: 100.0})
    outputs = await collect(shared, prompt, sampling)
    assert tokens_of(outputs) == [11] * 4
    for position, output in enumerate(outputs):
        want = reference_logits(prompt + [11] * position)[-1].log_softmax(-1)
        assert output.logprobs is not None
        (entry,) = output.logprobs
        assert entry.token_id == 11
        assert entry.logprob == pytest.approx(float(want[11]), abs=1e-5)
        assert [logprob for _, logprob in entry.top] == pytest.approx(want.topk(5).values.tolist(), abs=1e-5)


@pytest.mark.parametrize("length", [1, 2, 16, 17, 40])
@pytest.mark.parametrize("max_tokens", [0, 2])
async def test_prompt_logprobs_over_chunks(shared: EngineClient, length: int, max_tokens: int) -> None:
    """Twice, because the second time the blocks are cached and must not be used."""
    prompt = [(11 * i) % 59 for i in range(length)]
    want = reference_logits(prompt).log_softmax(-1)
    for _ in range(2):
        outputs = await collect(shared, prompt, greedy(max_tokens, prompt_logprobs=2))
        found = outputs[0].prompt_logprobs
        assert found is not None
        assert found[0] is None
        assert len(found) == length
        assert outputs[0].cached_tokens == 0
        for position, entry in enumerate(found[1:], start=1):
            assert entry is not None
            assert entry.token_id == prompt[position]
            assert entry.logprob == pytest.approx(float(want[position - 1, prompt[position]]), abs=1e-5)
            assert len(entry.top) == 2
        assert tokens_of(outputs) == reference_greedy(prompt, max_tokens)
        assert outputs[-1].finish_reason == "length"


async def test_prefix_cache_is_used_and_right() -> None:
    async with engine() as client:
        prompt = [(3 * i) % 59 for i in range(30)]
        first = await collect(client, prompt, greedy(6))
        second = await collect(client, prompt, greedy(6))
        other = await collect(client, [*prompt[:13], 50, 51], greedy(6))
        assert first[0].cached_tokens == 0
        assert second[0].cached_tokens == 28, "all full blocks of 4 but the one with the last token"
        assert other[0].cached_tokens == 12
        assert tokens_of(second) == tokens_of(first) == reference_greedy(prompt, 6)
        assert tokens_of(other) == reference_greedy([*prompt[:13], 50, 51], 6)
        assert client.stats.prefix_cache_hits_total == 40
        assert client.stats.prefix_cache_queries_total == 75


async def test_prefix_cache_can_be_off() -> None:
    async with engine(enable_prefix_caching=False) as client:
        prompt = list(range(30))
        await collect(client, prompt, greedy(2))
        assert (await collect(client, prompt, greedy(2)))[0].cached_tokens == 0


async def test_preemption_changes_nothing() -> None:
    """Four sequences that need 4 * 10 blocks share 16; twice over, some are recomputed."""
    async with engine(kv_cache_bytes=16 * 32, max_queue=8) as client:
        assert client.info.num_kv_blocks == 16
        prompts = [[(13 * i + k) % 59 for i in range(8)] for k in range(8)]
        sampling = [greedy(30), SamplingParams(max_tokens=30, seed=3, ignore_eos=True)] * 4
        together = await asyncio.gather(
            *(collect(client, prompt, kind) for prompt, kind in zip(prompts, sampling, strict=True))
        )
        assert client.stats.preemptions_total > 0
        for prompt, kind, outputs in zip(prompts, sampling, together, strict=True):
            alone = await collect(client, prompt, kind)
            assert tokens_of(outputs) == tokens_of(alone)
            assert len(tokens_of(outputs)) == 30
        assert client.stats.prompt_tokens_total == 16 * 8
        assert client.stats.generation_tokens_total == 16 * 30


async def test_sequence_that_never_fits_fails_alone() -> None:
    async with engine(kv_cache_bytes=4 * 32) as client:
        prompt_too_long, grows_too_long, fits = await asyncio.gather(
            collect(client, [1] * 17, greedy(1)),
            collect(client, [1] * 10, greedy(30)),
            collect(client, [2, 3], greedy(6)),
        )
        assert [output.finish_reason for output in prompt_too_long] == ["error"]
        assert "17 tokens need 5 KV blocks" in (prompt_too_long[0].error or "")
        assert grows_too_long[-1].finish_reason == "error"
        assert tokens_of(grows_too_long) == reference_greedy([1] * 10, 7)
        assert tokens_of(fits) == reference_greedy([2, 3], 6)


async def test_nan_logits_fail_one_sequence(shared: EngineClient) -> None:
    bad, bad_prompt, good = await asyncio.gather(
        collect(shared, [5, 6, fake_model.NAN_TOKEN], greedy(5)),
        collect(shared, [5, fake_model.NAN_TOKEN, 6], greedy(5, prompt_logprobs=0)),
        collect(shared, [5, 6, 7], greedy(5)),
    )
    for outputs in (bad, bad_prompt):
        assert [output.finish_reason for output in outputs] == ["error"]
        assert "not finite" in (outputs[0].error or "")
    assert tokens_of(good) == reference_greedy([5, 6, 7], 5)


async def test_step_that_raises_fails_its_sequences_only(shared: EngineClient) -> None:
    bad = await collect(shared, [5, fake_model.RAISING_TOKEN, 6], greedy(5))
    assert [output.finish_reason for output in bad] == ["error"]
    assert "secret" not in (bad[0].error or "")
    assert tokens_of(await collect(shared, [5, 6], greedy(5))) == reference_greedy([5, 6], 5)
    assert shared.alive
    assert shared.stats.kv_blocks_used == 0


async def test_broken_model_ends_the_engine() -> None:
    client = await EngineClient.start(config())
    try:
        running = client.generate("running", [1], FOREVER)
        await anext(running)
        bad = client.generate("bad", [fake_model.BREAKING_TOKEN], greedy(5))
        for stream in (running, bad):
            outputs = [output async for output in stream]
            assert outputs[-1].finish_reason == "error"
        await asyncio.wait_for(client.died.wait(), 30)
        assert "the device is lost" in (client.failure or "")
        with pytest.raises(EngineUnavailable) as caught:
            client.admit()
        assert "secret" not in caught.value.message
    finally:
        await client.stop()


async def test_abort_frees_blocks(shared: EngineClient) -> None:
    watch = StatsWatch(shared)
    stream = shared.generate("aborted", [1] * 9, FOREVER)
    await anext(stream)
    shared.abort(["aborted", "aborted", "unknown"])
    shared.abort(["aborted"])
    outputs = [output async for output in stream]
    assert outputs[-1].finish_reason == "abort"
    stats = await watch.until(lambda stats: stats.running == 0)
    assert stats.kv_blocks_used == 0
    assert shared.open_sequences == 0


async def test_abort_before_it_ran(shared: EngineClient) -> None:
    """Four run and fill the engine, so the fifth waits; it ends without having run."""
    running = [shared.generate(f"busy{i}", [1], FOREVER) for i in range(4)]
    waiting = shared.generate("waiting", [1], FOREVER)
    for stream in running:
        await anext(stream)
    shared.abort(["waiting"])
    assert [output.finish_reason async for output in waiting] == ["abort"]
    shared.abort([stream.request_id for stream in running])
    for stream in running:
        assert [output.finish_reason async for output in stream][-1] == "abort"


async def test_abort_of_everything_in_mid_prefill(shared: EngineClient) -> None:
    watch = StatsWatch(shared)
    prompt = [(17 * i) % 59 for i in range(6000)]  # 375 steps of 16 tokens
    streams = [shared.generate(f"long{i}", prompt, greedy(5)) for i in range(2)]
    await watch.until(lambda stats: stats.running == 1 and stats.kv_blocks_used > 0)
    shared.abort([stream.request_id for stream in streams])
    for stream in streams:
        assert [output.finish_reason async for output in stream] == ["abort"]
    stats = await watch.until(lambda stats: stats.running == stats.waiting == 0)
    assert stats.kv_blocks_used == 0
    assert tokens_of(await collect(shared, prompt[:40], greedy(3))) == reference_greedy(prompt[:40], 3)


async def close(client: EngineClient) -> None:
    stream = client.generate("left", [1], FOREVER)
    await anext(stream)
    await stream.aclose()
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def drop(client: EngineClient) -> None:
    async for _ in client.generate("left", [1], FOREVER):
        break


async def cancel(client: EngineClient) -> None:
    started = asyncio.Event()

    async def read() -> None:
        async for _ in client.generate("left", [1], FOREVER):
            started.set()

    task = asyncio.ensure_future(read())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("leave", [close, drop, cancel])
async def test_leaving_the_iterator_aborts(
    shared: EngineClient, leave: Callable[[EngineClient], Awaitable[None]]
) -> None:
    watch = StatsWatch(shared)
    await leave(shared)
    await watch.until(lambda stats: shared.open_sequences == 0)
    assert shared.slots_free == 8


async def test_queue_is_bounded_and_admission_is_all_or_none(shared: EngineClient) -> None:
    with shared.admit(6) as admission:
        with pytest.raises(QueueFull, match="2 free, 3 asked for"):
            shared.admit(3)
        shared.generate("one", [1], greedy(1), admission).close()
        with shared.admit(2), pytest.raises(QueueFull):
            shared.generate("none", [1], greedy(1))
    with pytest.raises(InvalidRequest, match="at most 8"):
        shared.admit(9)
    watch = StatsWatch(shared)
    await watch.until(lambda stats: shared.open_sequences == 0)
    assert shared.slots_free == 8


@pytest.mark.parametrize(
    ("prompt", "sampling", "param"),
    [
        ([], greedy(1), "prompt"),
        ([64], greedy(1), "prompt"),
        ([-1], greedy(1), "prompt"),
        ([1], greedy(1, logit_bias={64: 1.0}), "logit_bias"),
        ([1], greedy(1, stop_token_ids=(99,)), "stop_token_ids"),
    ],
)
async def test_bad_requests_never_reach_the_engine(
    shared: EngineClient, prompt: list[int], sampling: SamplingParams, param: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        shared.generate("bad", prompt, sampling)
    assert caught.value.param == param
    assert shared.slots_free == 8


async def test_idle_engine_keeps_its_heartbeat(shared: EngineClient) -> None:
    watch = StatsWatch(shared)
    seen: list[float] = []

    def note(stats: EngineStats) -> None:
        seen.append(shared.heartbeat_age_seconds)
        watch.seen(stats)

    shared.on_stats = note
    await watch.until(lambda stats: len(seen) >= 2)
    assert shared.stats.linear_calls_total["dense|1"] > 0
    assert shared.stats.resident_bytes > 10_000_000


async def test_steps_are_reported_by_phase() -> None:
    async with engine() as client:
        steps: list[tuple[str, float, int]] = []
        client.on_stats = lambda stats: steps.extend(stats.step_seconds)
        running = client.generate("running", [1], greedy(8))
        await anext(running)
        await collect(client, [2] * 30, greedy(1))
        async for _ in running:
            pass
        assert steps[0][0] == "prefill"
        assert {phase for phase, _, _ in steps} >= {"prefill", "decode"}
        assert sum(tokens for _, _, tokens in steps) == 1 + 7 + 30
        assert all(seconds > 0 for _, seconds, _ in steps)


async def test_progress_and_no_leftovers() -> None:
    stages: list[LoadProgress] = []
    client = await EngineClient.start(config(), on_progress=stages.append)
    directory = client._directory
    assert directory is not None
    assert directory.stat().st_mode & 0o777 == 0o700
    assert LoadProgress(stage="load weights", fraction=1.0) in stages
    process = psutil.Process(client.pid)
    await client.stop()
    assert not directory.exists()
    assert not process.is_running()
    assert not client.died.is_set(), "an engine that was asked to stop has not died"
    with pytest.raises(EngineUnavailable):
        client.admit()
    await client.stop()


async def test_stop_fails_open_requests() -> None:
    client = await EngineClient.start(config())
    stream = client.generate("open", [1], FOREVER)
    await anext(stream)
    await client.stop()
    with pytest.raises(EngineUnavailable, match="stopping"):
        async for _ in stream:
            pass


async def test_killed_engine_fails_open_requests() -> None:
    client = await EngineClient.start(config())
    try:
        streams = [client.generate(f"open{i}", [1], FOREVER) for i in range(6)]
        await anext(streams[0])
        os.kill(client.pid, signal.SIGKILL)
        for stream in streams:
            with pytest.raises(EngineUnavailable, match="has died"):
                async for _ in stream:
                    pass
        assert client.died.is_set()
        assert not client.alive
        assert "SIGKILL" in (client.failure or "")
        assert client.slots_free == 8
        with pytest.raises(EngineUnavailable):
            client.generate("late", [1], FOREVER)
    finally:
        await client.stop()


async def test_engine_ignores_the_signals_that_the_parent_handles() -> None:
    """Ctrl-C and a service manager signal the whole group; open streams shall finish."""
    async with engine() as client:
        stream = client.generate("open", [1], greedy(200))
        await anext(stream)
        os.kill(client.pid, signal.SIGINT)
        os.kill(client.pid, signal.SIGTERM)
        outputs = [output async for output in stream]
        assert outputs[-1].finish_reason == "length"


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"model": "bad-checkpoint"}, CheckpointError, "tensor lm_head.weight is missing"),
        ({"model": "unforeseen"}, StartupError, "KeyError: 'lm_head'"),
        ({"model": "dies"}, StartupError, "exit status 7"),
        ({"model_factory": "no.such:load"}, SettingsError, "model_factory"),
        ({"kv_cache_bytes": 1}, SettingsError, "one block of 4 tokens takes 32"),
    ],
)
async def test_start_up_failure_is_raised_as_its_class(
    changes: dict[str, Any], kind: type[StartupError], message: str
) -> None:
    with pytest.raises(StartupError) as caught:
        await EngineClient.start(config(**changes))
    assert type(caught.value) is kind
    assert message in caught.value.message


@pytest.mark.parametrize(("level", "told"), [(logging.INFO, True), (logging.WARNING, False)])
async def test_the_engine_logs_from_the_level_of_the_server(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str], level: int, told: bool
) -> None:
    """The model says there why it runs through transformers."""
    caplog.set_level(level, logger="lacunar")
    async with engine(model="talks"):
        pass
    assert ("INFO lacunar.model: told at info" in capfd.readouterr().err) == told


async def test_cancelled_start_leaves_no_process() -> None:
    loading = asyncio.Event()
    before = set(psutil.Process().children())
    start = asyncio.ensure_future(
        EngineClient.start(config(model="hangs"), on_progress=lambda progress: loading.set())
    )
    await loading.wait()
    (child,) = set(psutil.Process().children()) - before
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert not child.is_running()


PARENT = """
import asyncio, sys
from service.engine.client import EngineClient
from service.engine.config import EngineConfig

async def main():
    client = await EngineClient.start(EngineConfig(model="fake", model_factory=sys.argv[1], threads=1))
    print(client.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_engine_ends_with_its_parent(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)}
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, f"{fake_model.__name__}:load"],
        stdout=subprocess.PIPE,
        env=environment,
        cwd=tmp_path,
    )
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    gone, alive = psutil.wait_procs([child], timeout=30)
    assert not alive
    assert gone
