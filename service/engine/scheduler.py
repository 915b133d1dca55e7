"""What the next step computes: continuous batching over a paged KV cache. No IO, no clock, no torch.

A step has a budget of tokens. Sequences that decode go first, one token each; then running prompts and
waiting ones, first come first served, in chunks that fill the budget up. Three rules keep this simple and
fair:

- A sequence gets the blocks for all tokens it has when it starts to run, so a prefill never waits half-done.
  Only decoding asks for more, one block at a time.
- When a decoding sequence needs a block and none is left, the running sequence that came last gives all its
  blocks back and will be recomputed (its output so far becomes part of what is prefilled).
- So every running sequence came before every waiting one, and the oldest always moves on.

Every sequence that is added leaves exactly once: by `finish`, `fail`, `abort`, or in `StepPlan.failed`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from .block_pool import BlockPool
from .protocol import FinishReason
from .sequence import Sequence


@dataclass(slots=True)
class Chunk:
    """Tokens ``start .. start + length - 1`` of a sequence, computed in one step."""

    sequence: Sequence
    start: int
    length: int

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + self.length

    @property
    def completes(self) -> bool:
        """Whether all known tokens are computed after it, so that the next one can be sampled."""
        return self.end == self.sequence.num_tokens

    @property
    def decodes(self) -> bool:
        """Whether it computes just the token that was generated last."""
        return self.length == 1 and self.start >= self.sequence.prompt_length and self.completes


@dataclass(slots=True)
class StepPlan:
    """One step. `chunks` may be empty: then there is nothing to run.

    Attributes:
        chunks: what to compute, decoding sequences first.
        failed: sequences that can never run, with the reason; they have left the scheduler.
        phase: "prefill", "decode", or "mixed".
    """

    chunks: list[Chunk] = field(default_factory=list)
    failed: list[tuple[Sequence, str]] = field(default_factory=list)
    phase: str = "prefill"

    @property
    def num_tokens(self) -> int:
        """Tokens over all chunks."""
        return sum(chunk.length for chunk in self.chunks)


class Scheduler:
    """Holds all sequences and the block pool; the caller runs what `schedule` plans and reports back.

    Args:
        num_blocks, block_size: of the KV cache.
        max_num_sequences: that run at once.
        max_step_tokens: budget of a step, at least `max_num_sequences`.
        max_model_len: where a sequence ends for lack of context.
        enable_prefix_caching: reuse computed blocks. Never for sequences with `prompt_logprobs`, which need
            the logits of every prompt token.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_sequences: int,
        max_step_tokens: int,
        max_model_len: int,
        enable_prefix_caching: bool = True,
    ) -> None:
        assert max_step_tokens >= max_num_sequences, "a step must have a token for every running sequence"
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.max_num_sequences = max_num_sequences
        self.max_step_tokens = max_step_tokens
        self.max_model_len = max_model_len
        self.enable_prefix_caching = enable_prefix_caching
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self._sequences: dict[str, Sequence] = {}
        self.preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._sequences

    @property
    def has_work(self) -> bool:
        """Whether any sequence is here."""
        return bool(self._sequences)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence behind all others."""
        assert sequence.request_id not in self._sequences, f"{sequence.request_id} was added twice"
        self._sequences[sequence.request_id] = sequence
        self.waiting.append(sequence)

    def abort(self, request_id: str) -> Sequence | None:
        """Remove a sequence and free its blocks; None if it is not (or no longer) here."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self.finish(sequence)
        return sequence

    def finish(self, sequence: Sequence) -> None:
        """Remove a sequence; its full blocks stay findable."""
        self._remove(sequence)
        self.pool.release(sequence.take_blocks())

    def fail(self, sequence: Sequence) -> None:
        """Remove a sequence whose KV may be wrong: nobody will find its blocks."""
        self._remove(sequence)
        self.pool.discard(sequence.take_blocks())

    def schedule(self) -> StepPlan:
        """Plan the next step and give its sequences the blocks they need."""
        plan = StepPlan()
        preemptions_before = self.preemptions

        index = 0
        while index < len(self.running):
            sequence = self.running[index]
            if sequence.num_pending > 1:
                index += 1
            elif self._has_room(sequence, plan):
                plan.chunks.append(Chunk(sequence, sequence.num_computed, 1))
                index += 1
            # Otherwise it has left `running`, and so has everything behind it.

        budget = self.max_step_tokens - len(plan.chunks)
        for sequence in self.running:
            if budget and sequence.num_pending > 1:
                budget -= self._plan_prefill(plan, sequence, budget)

        # What was just preempted would be the first to come back, and to go again.
        if self.preemptions == preemptions_before:
            while budget and self.waiting and len(self.running) < self.max_num_sequences:
                sequence = self.waiting[0]
                if not self._can_ever_fit(sequence):
                    self._give_up(sequence, plan)
                elif self._start(sequence):
                    budget -= self._plan_prefill(plan, sequence, budget)
                else:
                    break

        decoding = sum(chunk.decodes for chunk in plan.chunks)
        if decoding:
            plan.phase = "decode" if decoding == len(plan.chunks) else "mixed"
        return plan

    def look_ahead(self, plan: StepPlan) -> tuple[StepPlan, list[int]] | None:
        """Plan the step after one that is being computed, before its tokens are known.

        Sequences that will end with it for their length are left out. One that turns out to have ended with a
        stop token is computed once more than needed: the caller drops what comes out.

        Args:
            plan: a step of chunks that all decode. Sequences of it may have left meanwhile.

        Returns:
            The step, and per chunk the index of its sequence in `plan`. None where the next step has to wait
            for this one: it could take a prompt on, blocks are short, or nothing would be left to compute.
        """
        if self.waiting and len(self.running) < self.max_num_sequences:
            return None
        following, sources, present, short = StepPlan(phase="decode"), [], 0, []
        for index, chunk in enumerate(plan.chunks):
            sequence = chunk.sequence
            if not self.holds(sequence):
                continue
            present += 1
            tokens = chunk.end + 1  # with the one that is being computed
            output = tokens - sequence.prompt_length
            if output >= sequence.sampling.max_tokens or tokens >= self.max_model_len:
                continue
            if tokens > sequence.num_blocks * self.block_size:
                short.append(sequence)
            following.chunks.append(Chunk(sequence, chunk.end, 1))
            sources.append(index)
        if not sources or present < len(self.running) or len(short) > self.pool.num_available:
            return None
        for sequence in short:
            sequence.append_blocks(self.pool.allocate(1))
        return following, sources

    def holds(self, sequence: Sequence) -> bool:
        """Whether this very sequence is here, not another one of its name."""
        return self._sequences.get(sequence.request_id) is sequence

    def commit(self, plan: StepPlan) -> None:
        """Note that a plan's chunks are computed. Their full blocks can be shared from now on."""
        for chunk in plan.chunks:
            sequence = chunk.sequence
            sequence.num_computed = chunk.end
            full = chunk.end // self.block_size
            if self.enable_prefix_caching and full > sequence.num_registered:
                digests = sequence.digests(full, self.block_size)
                for index in range(sequence.num_registered, full):
                    self.pool.register(int(sequence.blocks[index]), digests[index])
                sequence.num_registered = full

    def append(self, sequence: Sequence, token: int) -> FinishReason | None:
        """Add the sampled token and say whether the sequence ends with it. The caller then calls `finish`."""
        sequence.append_token(token)
        if token in sequence.stop_ids and sequence.num_output > sequence.sampling.min_tokens:
            return "stop"
        if sequence.num_output >= sequence.sampling.max_tokens or sequence.num_tokens >= self.max_model_len:
            return "length"
        return None

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _can_ever_fit(self, sequence: Sequence) -> bool:
        return self._blocks_for(sequence.num_tokens) <= self.pool.num_blocks

    def _has_room(self, sequence: Sequence, plan: StepPlan) -> bool:
        """Make sure that a decoding sequence has a block for its next token; False if it had to go itself."""
        if sequence.num_tokens <= sequence.num_blocks * self.block_size:
            return True
        while self.pool.num_available == 0:
            victim = self.running[-1]
            if victim is sequence and len(self.running) == 1:
                # It holds every block there is, so recomputing it would end here again.
                self._give_up(sequence, plan)
                return False
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.append_blocks(self.pool.allocate(1))
        return True

    def _plan_prefill(self, plan: StepPlan, sequence: Sequence, budget: int) -> int:
        length = min(sequence.num_pending, budget)
        plan.chunks.append(Chunk(sequence, sequence.num_computed, length))
        return length

    def _start(self, sequence: Sequence) -> bool:
        """Move the first waiting sequence to the running ones if all its blocks are to be had."""
        cached: list[int] = []
        looks_up = self.enable_prefix_caching and sequence.prompt_logprobs is None
        if looks_up:
            # The last token is computed in any case, for its logits.
            full = (sequence.num_tokens - 1) // self.block_size
            cached = self.pool.match(sequence.digests(full, self.block_size))
        new = self._blocks_for(sequence.num_tokens) - len(cached)
        # One block is left for each running sequence, which would otherwise soon push this one out again.
        if new + self.pool.count_unused(cached) + len(self.running) > self.pool.num_available:
            return False
        self.pool.share(cached)
        sequence.append_blocks(cached)
        sequence.append_blocks(self.pool.allocate(new))
        sequence.num_registered = len(cached)
        sequence.num_computed = len(cached) * self.block_size
        if looks_up:
            self.prefix_queries += sequence.num_tokens
            self.prefix_hits += sequence.num_computed
        if sequence.num_output == 0:
            sequence.cached_tokens = sequence.num_computed
        self.waiting.popleft()
        self.running.append(sequence)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        assert self.running[-1] is sequence
        self.running.pop()
        self.pool.release(sequence.take_blocks())
        self.waiting.appendleft(sequence)
        self.preemptions += 1

    def _give_up(self, sequence: Sequence, plan: StepPlan) -> None:
        needed = self._blocks_for(sequence.num_tokens)
        self.finish(sequence)
        plan.failed.append(
            (
                sequence,
                f"{sequence.num_tokens} tokens need {needed} KV blocks of {self.block_size}, but the cache "
                f"has {self.pool.num_blocks} in all. Ask for less, or give the server more kv_cache_bytes.",
            )
        )

    def _remove(self, sequence: Sequence) -> None:
        del self._sequences[sequence.request_id]
        if sequence.num_blocks:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
