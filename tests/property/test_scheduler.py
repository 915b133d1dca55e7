"""The scheduler against a model of the KV cache's content: random arrivals, aborts and block pressure."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from service.engine.protocol import SamplingParams
from service.engine.scheduler import Scheduler, StepPlan
from service.engine.sequence import Sequence

EOS = 1
BEGINNING = [2 + index % 5 % 2 for index in range(36)]
"""What all prompts share some of, so that there is much to find in the prefix cache."""


def prefix_name(tokens: list[int]) -> bytes:
    return hashlib.sha1(bytes(tokens)).digest()


def next_token(tokens: list[int]) -> int:
    """What the imagined model says after these tokens; about one in eight is the end."""
    return prefix_name(tokens)[0] % 8


class CacheModel(RuleBasedStateMachine):
    """Writes into each slot which prefix its KV belongs to; checks every slot that attention would read."""

    @initialize(
        num_blocks=st.integers(1, 24),
        block_size=st.sampled_from([1, 2, 4, 16]),
        max_num_sequences=st.integers(1, 6),
        extra_tokens=st.integers(0, 24),
        caching=st.booleans(),
    )
    def start(
        self, num_blocks: int, block_size: int, max_num_sequences: int, extra_tokens: int, caching: bool
    ) -> None:
        self.scheduler = Scheduler(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_sequences=max_num_sequences,
            max_step_tokens=max_num_sequences + extra_tokens,
            max_model_len=64,
            enable_prefix_caching=caching,
        )
        self.slots: dict[int, bytes] = {}
        self.arrived: list[str] = []
        self.open: dict[str, Sequence] = {}
        self.finished: set[str] = set()
        self.first_scheduled: list[str] = []

    @rule(
        shared=st.integers(0, 36),
        tail=st.lists(st.integers(2, 3), min_size=1, max_size=4),
        max_tokens=st.integers(1, 30),
        ignore_eos=st.booleans(),
        prompt_logprobs=st.sampled_from([None, None, 0]),
    )
    def add(
        self,
        shared: int,
        tail: list[int],
        max_tokens: int,
        ignore_eos: bool,
        prompt_logprobs: int | None,
    ) -> None:
        prompt = BEGINNING[:shared] + tail
        sampling = SamplingParams(
            max_tokens=max_tokens, ignore_eos=ignore_eos, prompt_logprobs=prompt_logprobs
        )
        sequence = Sequence(f"r{len(self.arrived)}", prompt, sampling, eos_token_ids=(EOS,))
        self.arrived.append(sequence.request_id)
        self.open[sequence.request_id] = sequence
        self.scheduler.add(sequence)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.open)))
        assert self.scheduler.abort(request_id) is self.open.pop(request_id)
        assert self.scheduler.abort(request_id) is None
        self.finished.add(request_id)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def fail_running(self, data: st.DataObject) -> None:
        """A sequence whose KV turned out wrong: its slots are garbage that nobody may read."""
        running = self.scheduler.running
        if running:
            sequence = data.draw(st.sampled_from(running))
            others = {
                block
                for other in running
                if other is not sequence
                for block in other.blocks[: other.num_blocks].tolist()
            }
            size = self.scheduler.block_size
            for block in set(sequence.blocks[: sequence.num_blocks].tolist()) - others:
                for slot in range(block * size, (block + 1) * size):
                    self.slots[slot] = b"garbage"
            self.scheduler.fail(sequence)
            self.end(sequence)

    @rule()
    def step(self) -> None:
        plan = self.scheduler.schedule()
        for sequence, reason in plan.failed:
            assert sequence.num_tokens > self.scheduler.pool.num_blocks * self.scheduler.block_size
            assert "KV blocks" in reason
            self.end(sequence)
        self.check_plan(plan)
        self.run(plan)
        self.scheduler.commit(plan)
        for chunk in plan.chunks:
            sequence = chunk.sequence
            if chunk.completes:
                token = next_token(sequence.tokens[: sequence.num_tokens].tolist())
                reason = self.scheduler.append(sequence, token)
                stops = token == EOS and not sequence.sampling.ignore_eos
                full = sequence.num_output == sequence.sampling.max_tokens or sequence.num_tokens == 64
                assert reason == ("stop" if stops else "length" if full else None)
                if reason is not None:
                    self.scheduler.finish(sequence)
                    self.end(sequence)

    def check_plan(self, plan: StepPlan) -> None:
        scheduler = self.scheduler
        assert plan.num_tokens <= scheduler.max_step_tokens
        assert bool(plan.chunks) or bool(plan.failed) or not self.open, "a step must move something on"
        ids = [chunk.sequence.request_id for chunk in plan.chunks]
        assert len(set(ids)) == len(ids)
        planned = set(ids)
        for sequence in scheduler.running:
            if sequence.num_computed and sequence.num_pending == 1:
                assert sequence.request_id in planned, "every decoding sequence moves on in every step"
        for chunk in plan.chunks:
            sequence = chunk.sequence
            assert chunk.length >= 1
            assert chunk.start == sequence.num_computed
            assert chunk.end <= sequence.num_tokens
            assert sequence.num_blocks * scheduler.block_size >= chunk.end
            if sequence.sampling.prompt_logprobs is not None and chunk.start > 0:
                assert sequence.cached_tokens == 0
            if sequence.request_id not in self.first_scheduled:
                self.first_scheduled.append(sequence.request_id)

    def run(self, plan: StepPlan) -> None:
        size = self.scheduler.block_size
        owners: dict[int, list[str]] = {}
        for sequence in self.scheduler.running:
            for block in sequence.blocks[: sequence.num_blocks].tolist():
                owners.setdefault(block, []).append(sequence.request_id)
        for chunk in plan.chunks:
            tokens = chunk.sequence.tokens.tolist()
            table = chunk.sequence.blocks.tolist()
            for position in range(chunk.start, chunk.end):
                block = table[position // size]
                assert len(owners[block]) == 1, f"block {block} is written while {owners[block]} hold it"
                self.slots[block * size + position % size] = prefix_name(tokens[: position + 1])
        for chunk in plan.chunks:
            tokens = chunk.sequence.tokens.tolist()
            table = chunk.sequence.blocks.tolist()
            for position in range(chunk.end):
                slot = table[position // size] * size + position % size
                assert self.slots[slot] == prefix_name(tokens[: position + 1]), "KV of another prefix is read"

    def end(self, sequence: Sequence) -> None:
        assert sequence.request_id not in self.finished, "a sequence ended twice"
        del self.open[sequence.request_id]
        self.finished.add(sequence.request_id)
        assert sequence.num_blocks == 0

    @invariant()
    def blocks_add_up(self) -> None:
        scheduler = self.scheduler
        held = {
            block
            for sequence in scheduler.running
            for block in sequence.blocks[: sequence.num_blocks].tolist()
        }
        assert scheduler.pool.num_used == len(held)
        assert all(sequence.num_blocks == 0 for sequence in scheduler.waiting)

    @invariant()
    def arrival_order_is_kept(self) -> None:
        order = [self.arrived.index(sequence.request_id) for sequence in self.scheduler.running]
        order += [self.arrived.index(sequence.request_id) for sequence in self.scheduler.waiting]
        assert order == sorted(order)
        assert len(self.scheduler.running) <= self.scheduler.max_num_sequences
        scheduled = [self.arrived.index(request_id) for request_id in self.first_scheduled]
        assert scheduled == sorted(scheduled), "a later arrival started first"

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        # Each step computes at least one token of the oldest sequence, and a preempted one starts over: far
        # fewer steps than this are ever needed, so reaching it means that something no longer moves.
        for _ in range(64 * 64 * (len(self.open) + 1)):
            if not self.open:
                break
            self.step()
            self.blocks_add_up()
            self.arrival_order_is_kept()
        assert not self.open
        assert not self.scheduler.has_work
        assert self.finished == set(self.arrived)
        assert self.scheduler.pool.num_used == 0
        every_block = list(range(self.scheduler.pool.num_blocks))
        assert sorted(self.scheduler.pool.allocate(len(every_block))) == every_block


TestScheduler = pytest.mark.filterwarnings("error")(CacheModel.TestCase)
TestScheduler.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
