"""One sequence in the engine: its tokens, how far they are computed, and the blocks that hold their KV."""

from __future__ import annotations

import hashlib
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .protocol import SamplingParams, TokenLogprobs

_DIGEST_BYTES = 16


class ConstraintFailed(Exception):
    """A constraint cannot say any more which tokens may come next; the message is for the client."""


class TokenConstraint(Protocol):
    """Says which tokens may come next in one sequence, given those so far (structured output).

    Whoever samples calls `fill` before a token is chosen, masks the logits by it, and calls `accept` with the
    token before the next `fill`. So the host must know each token before the next one is sampled.
    """

    def fill(self, words: NDArray[np.int32]) -> bool:
        """Set bit ``t % 32`` of ``words[t // 32]`` for each token t that may come next, clear the others.

        Args:
            words: ``[ceil(vocab_size / 32)]``.

        Returns:
            False when every token may come next, so that there is nothing to mask.

        Raises:
            ConstraintFailed: the sequence must end with this error.
        """
        ...

    def accept(self, token: int) -> None:
        """Note the token that was chosen. Raises ConstraintFailed for one that `fill` did not allow."""
        ...


class Sequence:
    """A prompt and what was generated from it.

    Tokens and block ids lie in int32 arrays that grow by doubling, so that a step's batch is filled by
    slices.

    Attributes:
        tokens: ``[>= num_tokens]`` int32, prompt then output.
        num_tokens: tokens known so far; the last may have no KV yet.
        prompt_length: how many of them came with the request.
        num_computed: tokens whose KV is in the cache; 0 while waiting.
        blocks: ``[>= num_blocks]`` int32, the block table.
        num_registered: leading blocks whose content the prefix cache was offered.
        cached_tokens: tokens whose KV was found in the prefix cache when it was first scheduled.
        stop_ids: tokens that end it.
        arrival_seconds, first_scheduled_seconds: on the engine's monotonic clock.
        prompt_logprobs: gathered while the prompt is prefilled; None if not asked for.
        constraint: which tokens may be sampled; None allows all.
    """

    __slots__ = (
        "_digests",
        "arrival_seconds",
        "blocks",
        "cached_tokens",
        "constraint",
        "first_scheduled_seconds",
        "num_blocks",
        "num_computed",
        "num_registered",
        "num_tokens",
        "prompt_length",
        "prompt_logprobs",
        "request_id",
        "sampling",
        "stop_ids",
        "tokens",
    )

    def __init__(
        self,
        request_id: str,
        prompt: list[int],
        sampling: SamplingParams,
        *,
        eos_token_ids: tuple[int, ...] = (),
        arrival_seconds: float = 0.0,
        constraint: TokenConstraint | None = None,
    ) -> None:
        self.request_id = request_id
        self.sampling = sampling
        self.tokens: NDArray[np.int32] = np.array(prompt, dtype=np.int32)
        self.num_tokens = len(prompt)
        self.prompt_length = len(prompt)
        self.num_computed = 0
        self.blocks: NDArray[np.int32] = np.zeros(8, dtype=np.int32)
        self.num_blocks = 0
        self.num_registered = 0
        self.cached_tokens = 0
        self.stop_ids = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            self.stop_ids |= frozenset(eos_token_ids)
        self.arrival_seconds = arrival_seconds
        self.constraint = constraint
        self.first_scheduled_seconds: float | None = None
        self.prompt_logprobs: list[TokenLogprobs | None] | None = (
            None if sampling.prompt_logprobs is None else [None]
        )
        self._digests: list[bytes] = []

    @property
    def num_output(self) -> int:
        """Tokens generated so far."""
        return self.num_tokens - self.prompt_length

    @property
    def num_pending(self) -> int:
        """Tokens that must be computed before the next one can be sampled."""
        return self.num_tokens - self.num_computed

    def append_token(self, token: int) -> None:
        """Add a generated token."""
        if self.num_tokens == len(self.tokens):
            self.tokens = np.concatenate([self.tokens, np.zeros(max(32, len(self.tokens)), np.int32)])
        self.tokens[self.num_tokens] = token
        self.num_tokens += 1

    def append_blocks(self, blocks: list[int]) -> None:
        """Extend the block table."""
        end = self.num_blocks + len(blocks)
        if end > len(self.blocks):
            grown = np.zeros(max(end, 2 * len(self.blocks)), dtype=np.int32)
            grown[: self.num_blocks] = self.blocks[: self.num_blocks]
            self.blocks = grown
        self.blocks[self.num_blocks : end] = blocks
        self.num_blocks = end

    def take_blocks(self) -> list[int]:
        """Empty the block table and return what it held; nothing counts as computed after that."""
        blocks: list[int] = self.blocks[: self.num_blocks].tolist()
        self.num_blocks = 0
        self.num_computed = 0
        self.num_registered = 0
        return blocks

    def digests(self, count: int, block_size: int) -> list[bytes]:
        """Names of the first `count` full blocks' content; each covers all tokens from the start to its end.

        128 bits of BLAKE2b, so that two different beginnings never share KV, not even ones made up to
        collide.
        """
        known = self._digests
        for index in range(len(known), count):
            parent = known[-1] if known else b""
            content = self.tokens[index * block_size : (index + 1) * block_size].tobytes()
            known.append(hashlib.blake2b(parent + content, digest_size=_DIGEST_BYTES).digest())
        return known[:count]
