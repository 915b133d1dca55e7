"""Steps launched before the tokens of the step before are known: a worker in this process, random traffic."""

from __future__ import annotations

import copy
import random
from collections import defaultdict
from typing import Any

import fake_model
import msgspec
import numpy as np
import pytest
import torch
import zmq
from fake_model import EOS, NAN_TOKEN, VOCAB, reference_greedy

from service.engine import worker as worker_module
from service.engine.config import EngineConfig
from service.engine.protocol import AbortRequest, AddRequest, FromEngine, SamplingParams, StepOutputs
from service.engine.runner import ModelRunner
from service.engine.scheduler import Chunk, StepPlan
from service.engine.worker import Worker


class Chosen:
    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    def wait(self) -> list[int]:
        return self.tokens


class LaunchingRunner(ModelRunner):
    """Does on a CPU what captured steps do on a GPU: it takes a step's tokens from the step before."""

    can_launch = True

    def launch(self, plan: StepPlan, sources: list[int] | None = None) -> Any:
        chunks = []
        for row, chunk in enumerate(plan.chunks):
            sequence = chunk.sequence
            if sources is not None:
                sequence = copy.copy(sequence)
                fed = max(0, self.last[sources[row]])
                sequence.tokens = np.append(sequence.tokens[: chunk.start], [fed]).astype(np.int32)
                sequence.num_tokens = chunk.end
                self.ahead += 1
            chunks.append(Chunk(sequence, chunk.start, 1))
        logits = self.run(StepPlan(chunks=chunks, phase="decode")).logits
        self.last = torch.where(torch.isfinite(logits.amax(-1)), logits.argmax(-1), -1).tolist()
        return Chosen(self.last)

    ahead = 0


class Bench:
    """A worker, and what it has sent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
        monkeypatch.setattr(worker_module, "ModelRunner", LaunchingRunner)
        monkeypatch.setattr(worker_module.torch, "set_num_threads", lambda count: None)
        monkeypatch.setattr(worker_module.torch, "set_grad_enabled", lambda mode: None)
        self.context = zmq.Context()
        self.outputs = self.context.socket(zmq.PULL)
        self.outputs.set_hwm(0)
        self.outputs.bind("inproc://outputs")
        sender = self.context.socket(zmq.PUSH)
        sender.set_hwm(0)
        sender.connect("inproc://outputs")
        self.sender = self.context.socket(zmq.PUSH)
        self.sender.bind("inproc://commands")
        commands = self.context.socket(zmq.PULL)
        commands.connect("inproc://commands")
        defaults = {
            "max_num_sequences": 4,
            "max_step_tokens": 16,
            "kv_block_size": 4,
            "kv_cache_bytes": 8 * 4 * 18,
        }
        config = EngineConfig(
            model="fake", model_factory=f"{fake_model.__name__}:load", seed=1, **(defaults | changes)
        )
        self.worker = Worker(config, commands, sender)
        self.decoder = msgspec.msgpack.Decoder(FromEngine)
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.ends: dict[str, str] = {}

    def add(self, name: str, prompt: list[int], **sampling: Any) -> None:
        sampling = {"temperature": 0.0, **sampling}
        request = AddRequest(request_id=name, prompt_token_ids=prompt, sampling=SamplingParams(**sampling))
        self.sender.send(msgspec.msgpack.encode(request))

    def abort(self, name: str) -> None:
        self.sender.send(msgspec.msgpack.encode(AbortRequest(request_ids=[name])))

    def turn(self) -> None:
        """One turn of the worker's loop."""
        if self.sender.poll(0, zmq.POLLOUT):
            self.worker._receive() if self.worker._busy or self.worker._commands.poll(0) else None
        if self.worker._busy:
            self.worker._step()
        self.worker._report()
        while self.outputs.poll(0):
            message = self.decoder.decode(self.outputs.recv())
            if isinstance(message, StepOutputs):
                for output in message.outputs:
                    assert output.request_id not in self.ends, "an output after the end"
                    self.tokens[output.request_id] += output.token_ids
                    if output.finish_reason is not None:
                        self.ends[output.request_id] = output.finish_reason

    def finish(self) -> None:
        for _ in range(20_000):
            if not self.worker._busy and not self.worker._commands.poll(0):
                break
            self.turn()
        assert not self.worker._busy
        assert self.worker.scheduler.pool.num_used == 0

    def close(self) -> None:
        self.context.destroy(linger=0)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = Bench(monkeypatch)
    yield made
    made.close()


def test_stops_lengths_and_neighbours_are_as_without_looking_ahead(bench: Bench) -> None:
    """A sequence that stops is computed once more than needed; nobody sees what comes out."""
    rng = random.Random(3)
    wanted = {}
    for index in range(12):
        prompt = [rng.randrange(NAN_TOKEN) for _ in range(rng.randrange(1, 20))]
        count = rng.randrange(1, 40)
        bench.add(f"r{index}", prompt, max_tokens=count)
        wanted[f"r{index}"] = reference_greedy(prompt, count, stops=(EOS,))
    bench.finish()
    assert bench.tokens == wanted
    assert bench.worker.runner.ahead > 50


def test_random_traffic_leaks_nothing(bench: Bench) -> None:
    """Arrivals, aborts, sampled neighbours, shared beginnings and a cache too small for all: what is not
    aborted ends with the reference's tokens, and every block comes back."""
    rng = random.Random(5)
    shared = [rng.randrange(NAN_TOKEN) for _ in range(24)]
    wanted: dict[str, list[int]] = {}
    aborted: set[str] = set()
    for number in range(60):
        name = f"r{number}"
        prompt = shared[: rng.randrange(24)] + [rng.randrange(NAN_TOKEN) for _ in range(rng.randrange(1, 9))]
        count = rng.randrange(1, 30)
        if rng.random() < 0.2:
            bench.add(name, prompt, max_tokens=count, temperature=1.0)
        else:
            bench.add(name, prompt, max_tokens=count)
            wanted[name] = reference_greedy(prompt, count, stops=(EOS,))
        for _ in range(rng.randrange(12)):
            bench.turn()
        if rng.random() < 0.2:
            victim = f"r{rng.randrange(number + 1)}"
            bench.abort(victim)
            aborted.add(victim)
    bench.finish()
    assert set(bench.ends) == {f"r{number}" for number in range(60)}
    for name, tokens in wanted.items():
        if name in aborted:
            assert tokens[: len(bench.tokens[name])] == bench.tokens[name]
        else:
            assert bench.tokens[name] == tokens, name
    assert bench.worker.runner.ahead > 50
    assert bench.worker.scheduler.preemptions > 0


def test_logits_that_are_not_finite_end_one_sequence(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a step whose successor is under way."""
    bench.add("good", [1, 2, 3], max_tokens=30, ignore_eos=True)
    bench.add("bad", [4, 5, 6], max_tokens=30, ignore_eos=True)
    run, steps = bench.worker.runner.run, []

    def poisoned(plan: StepPlan) -> Any:
        step = run(plan)
        steps.append(plan)
        for row, chunk in enumerate(plan.chunks):
            if chunk.sequence.request_id == "bad" and chunk.start == 10:
                step.logits[row] = torch.nan
        return step

    monkeypatch.setattr(bench.worker.runner, "run", poisoned)
    bench.finish()
    assert bench.ends == {"good": "length", "bad": "error"}
    assert bench.tokens["good"] == reference_greedy([1, 2, 3], 30)
    assert bench.tokens["bad"] == reference_greedy([4, 5, 6], 8)


def test_a_step_that_raises_under_way_fails_its_sequences_alone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.add("first", [1, 2, 3], max_tokens=30)
    for _ in range(6):
        bench.turn()
    launch = bench.worker.runner.launch
    monkeypatch.setattr(bench.worker.runner, "launch", lambda *_: launch(None))
    bench.turn()
    monkeypatch.setattr(bench.worker.runner, "launch", launch)
    bench.add("second", [1, 2, 3], max_tokens=30)
    bench.finish()
    assert bench.ends["first"] == "error"
    assert bench.tokens["second"] == reference_greedy([1, 2, 3], 30, stops=(EOS,))
    assert "AttributeError" in capsys.readouterr().err


def test_the_vocabulary_is_what_the_test_assumes() -> None:
    assert EOS == VOCAB - 1
