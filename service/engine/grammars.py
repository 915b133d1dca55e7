"""Compiled grammars in the engine process: which tokens each constrained sequence may have next.

The API side compiles them (service.engine.grammar_client says why and how) and mirrors here which are kept.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .sequence import ConstraintFailed

# A grammar can be small and still take the matcher long at each token, when very many derivations fit what
# was written so far. The other sequences of the step wait meanwhile, so such a sequence is given up.
_SLOW_SECONDS = 0.5


class Grammars:
    """The grammars that requests may name.

    Args:
        vocab_size: columns of the logits.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._library: Any = None
        self._vocabulary: Any = None
        self._compiled: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self._compiled)

    def set_vocabulary(self, data: str) -> None:
        """Take over the tokenizer's description, once, before the first `add`."""
        # Only where grammars are used: the import takes half a second, and the package is an optional extra.
        import xgrammar

        self._library = xgrammar
        self._vocabulary = xgrammar.TokenizerInfo.deserialize_json(data)
        assert self._vocabulary.vocab_size == self._vocab_size

    def add(self, key: int, data: str) -> None:
        """Keep a grammar under `key`."""
        self._compiled[key] = self._library.CompiledGrammar.deserialize_json(data, self._vocabulary)

    def drop(self, key: int) -> None:
        """Forget it; constraints that were made of it live on."""
        del self._compiled[key]

    def constraint(self, key: int) -> GrammarConstraint:
        """A fresh constraint for one sequence."""
        return GrammarConstraint(self._library.GrammarMatcher(self._compiled[key]))


class GrammarConstraint:
    """Lets a sequence spell only what its grammar matches; a `service.engine.sequence.TokenConstraint`.

    Once the text is complete only end tokens are allowed. Time is the thread's own, so that a busy machine
    makes no sequence fail.
    """

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher
        self._seconds = 0.0

    def fill(self, words: NDArray[np.int32]) -> bool:
        """See TokenConstraint."""
        if self._seconds > _SLOW_SECONDS:
            raise ConstraintFailed("the grammar is too ambiguous to be followed at a useful speed")
        started = time.thread_time()
        masked: bool = self._matcher.fill_next_token_bitmask(words.reshape(1, -1), 0)
        self._seconds = time.thread_time() - started
        if masked and not words.any():
            raise ConstraintFailed("no token of this model continues the text as the grammar demands")
        return masked

    def accept(self, token: int) -> None:
        """See TokenConstraint."""
        started = time.thread_time()
        accepted = self._matcher.accept_token(token)
        self._seconds += time.thread_time() - started
        if not accepted:
            raise ConstraintFailed(f"token {token} does not continue the text as the grammar demands")
