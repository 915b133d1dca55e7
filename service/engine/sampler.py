"""Chooses the next token of each sequence of a step, all at once and on the device.

The order of what is done to a row of logits, each only where asked for:

1. repetition penalty on the tokens of prompt and output, then presence and frequency penalties on the
   output's;
2. logit_bias;
3. end and stop tokens are masked while there are fewer than min_tokens;
4. greedy: the largest. Otherwise divide by temperature, then keep the tokens that are at least as likely as
   the
   top_k-th; of those, renormalised, the fewest likeliest whose sum reaches top_p; of those the ones with at
   least min_p times the likelihood of the likeliest. Ties with the last token kept are kept, so that what is
   kept depends on the logits alone.
5. One uniform number per sequence picks from the cumulative distribution in order of token ids. It comes from
   a
   generator on the host that belongs to the sequence (or, without a seed, to the engine): the same on any
   device and in any company.

Log probabilities are those of the raw logits, before step 1.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .protocol import SamplingParams, TokenLogprobs
from .sequence import Sequence

# Below this the division by temperature leaves nothing of the second-likeliest token that float32 could show.
_GREEDY_TEMPERATURE = 1e-5

# On a CPU sorting a whole vocabulary costs milliseconds, so top_p looks at this many likeliest tokens first
# and at more only for the rows where their sum falls short. (A GPU sorts everything: that is cheaper than
# asking.)
_NUCLEUS_SIZES = (256, 4096)

# Bits of a uniform number: few enough that u < 1 survives every rounding below.
_UNIFORM_BITS = 32

# The cumulative distribution is taken in two steps, over groups of this many tokens and then within one
# group: a float64 running sum over 49152 tokens of 8 sequences takes 4.2 ms on one core of an EPYC, this 0.1
# ms.
_GROUP = 128

# Rows of prompt logits that are normalised at once, which bounds the extra memory.
_PROMPT_ROWS = 64

_NON_FINITE = "the model gave logits that are not finite, or every token is masked, so no token can be chosen"


class NonFiniteLogits(Exception):
    """The model gave NaN or infinity for a token of the prompt."""


@dataclass(slots=True)
class Sample:
    """What was chosen for one sequence; if `error` is set, nothing was, and `token` means nothing."""

    token: int
    logprobs: TokenLogprobs | None = None
    error: str | None = None


class _State:
    """What the sampler keeps of a sequence from its first token to its last."""

    __slots__ = ("bias_ids", "bias_values", "greedy", "penalised", "penalty_row", "rng", "stop_ids")

    def __init__(self, sequence: Sequence, engine_rng: random.Random) -> None:
        sampling = sequence.sampling
        self.greedy = sampling.temperature < _GREEDY_TEMPERATURE
        # random.Random takes the absolute value of an int, so a negative seed is mapped into 64 bits first.
        seed = None if sampling.seed is None else sampling.seed & (2**64 - 1)
        self.rng = engine_rng if seed is None else random.Random(seed)  # noqa: S311 (draws no secrets)
        self.penalised = (
            sampling.repetition_penalty != 1.0
            or sampling.presence_penalty != 0.0
            or sampling.frequency_penalty != 0.0
        )
        self.penalty_row = -1
        self.bias_ids = list(sampling.logit_bias.keys())
        self.bias_values = list(sampling.logit_bias.values())
        self.stop_ids = sorted(sequence.stop_ids) if sampling.min_tokens else []


class Sampler:
    """Batched sampling with per-sequence state.

    Args:
        vocab_size: columns of the logits.
        device: where they are.
        seed: of the generator for sequences without their own; None takes one from the system.
    """

    def __init__(self, vocab_size: int, device: torch.device, seed: int | None = None) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self._rng = random.Random(seed)  # noqa: S311 (draws no secrets)
        self._states: dict[str, _State] = {}
        self._penalties = _PenaltyTable(vocab_size, device)
        # Two buffers, reused each step: fresh memory of this size costs more than what is computed in it.
        # Columns past the vocabulary stay zero and fill the last group up.
        self._padded = -(-vocab_size // _GROUP) * _GROUP
        self._scaled = torch.empty(0, vocab_size, device=device)
        self._weights = torch.zeros(0, self._padded, device=device)

    def forget(self, request_id: str) -> None:
        """Drop what is kept of a sequence; unknown ids are ignored."""
        state = self._states.pop(request_id, None)
        if state is not None and state.penalty_row >= 0:
            self._penalties.release(state.penalty_row)

    def sample(self, logits: Tensor, sequences: list[Sequence]) -> list[Sample]:
        """Choose one token for each sequence.

        Args:
            logits: ``[S, vocab_size]`` float32 on the device; not changed.
            sequences: S sequences, row by row.

        Returns:
            S samples. A row with NaN or +inf, or with nothing but -inf, gives an error and leaves the others
            as they are.
        """
        total = len(sequences)
        states = [self._state(sequence) for sequence in sequences]
        penalised = [row for row, state in enumerate(states) if state.penalised]
        processed = self._process(logits, sequences, states, penalised)
        tokens = _argmax(processed)
        peaks = processed.gather(1, tokens.unsqueeze(1))
        finite = torch.isfinite(peaks).squeeze(1)
        if processed is not logits:  # a mask may have covered what was wrong
            finite &= torch.isfinite(logits.amax(dim=-1))

        drawn = [row for row, state in enumerate(states) if not state.greedy]
        if drawn:
            choice = self._draw(
                _take(processed, drawn),
                _take(peaks, drawn),
                [sequences[row].sampling for row in drawn],
                [states[row].rng.getrandbits(_UNIFORM_BITS) for row in drawn],
            )
            tokens = choice if len(drawn) == total else tokens.index_copy(0, self._rows(drawn), choice)
        if penalised:
            self._penalties.count([states[row].penalty_row for row in penalised], _take(tokens, penalised))

        wanted = [row for row, sequence in enumerate(sequences) if sequence.sampling.logprobs is not None]
        logprobs: dict[int, TokenLogprobs] = {}
        if wanted:
            tops = [sequences[row].sampling.logprobs or 0 for row in wanted]
            found = self._logprobs(_take(logits, wanted), _take(tokens, wanted), tops)
            logprobs = dict(zip(wanted, found, strict=True))
        return [
            Sample(token, logprobs.get(row)) if good else Sample(token, error=_NON_FINITE)
            for row, (token, good) in enumerate(zip(tokens.tolist(), finite.tolist(), strict=True))
        ]

    def prompt_logprobs(self, logits: Tensor, targets: list[int], top: int) -> list[TokenLogprobs]:
        """Log probabilities of a prompt's own tokens.

        Args:
            logits: ``[R, vocab_size]`` float32 on the device.
            targets: the R tokens that follow.
            top: how many likeliest alternatives to give with each.

        Raises:
            NonFiniteLogits: a row has NaN or +inf, or nothing but -inf.
        """
        result = []
        for first in range(0, len(targets), _PROMPT_ROWS):
            rows = logits[first : first + _PROMPT_ROWS]
            if not bool(torch.isfinite(rows.amax(dim=-1)).all()):
                raise NonFiniteLogits("the model gave logits that are not finite for the prompt")
            part = targets[first : first + _PROMPT_ROWS]
            result += self._logprobs(rows, torch.tensor(part, device=self.device), [top] * len(part))
        return result

    def _state(self, sequence: Sequence) -> _State:
        state = self._states.get(sequence.request_id)
        if state is None:
            state = _State(sequence, self._rng)
            if state.penalised:
                state.penalty_row = self._penalties.assign(sequence.tokens[: sequence.num_tokens])
            self._states[sequence.request_id] = state
        return state

    def _rows(self, rows: list[int]) -> Tensor:
        return torch.tensor(rows, dtype=torch.int64, device=self.device)

    def _process(
        self, logits: Tensor, sequences: list[Sequence], states: list[_State], penalised: list[int]
    ) -> Tensor:
        """Steps 1 to 3; the logits themselves if no sequence asks for any of them."""
        biased_rows: list[int] = []
        biased_ids: list[int] = []
        biases: list[float] = []
        masked_rows: list[int] = []
        masked_ids: list[int] = []
        for row, (sequence, state) in enumerate(zip(sequences, states, strict=True)):
            if state.bias_ids:
                biased_rows += [row] * len(state.bias_ids)
                biased_ids += state.bias_ids
                biases += state.bias_values
            if state.stop_ids and sequence.num_output < sequence.sampling.min_tokens:
                masked_rows += [row] * len(state.stop_ids)
                masked_ids += state.stop_ids
        if not (penalised or biased_rows or masked_rows):
            return logits

        logits = logits.clone()
        if penalised:
            rows = self._rows(penalised)
            parameters = [sequences[row].sampling for row in penalised]
            logits[rows] = self._penalties.apply(
                logits[rows],
                [states[row].penalty_row for row in penalised],
                self._column([p.repetition_penalty for p in parameters]),
                self._column([p.presence_penalty for p in parameters]),
                self._column([p.frequency_penalty for p in parameters]),
            )
        if biased_rows:
            added = torch.tensor(biases, dtype=torch.float32, device=self.device)
            logits.index_put_((self._rows(biased_rows), self._rows(biased_ids)), added, accumulate=True)
        if masked_rows:
            logits[self._rows(masked_rows), self._rows(masked_ids)] = -torch.inf
        return logits

    def _column(self, values: list[float], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device).unsqueeze(1)

    def _draw(
        self, logits: Tensor, peaks: Tensor, parameters: list[SamplingParams], bits: list[int]
    ) -> Tensor:
        """Steps 4 and 5 for rows that are not greedy: ``[n]`` int64. Rows that are not finite give any
        token."""
        count = len(parameters)
        if count > self._scaled.shape[0]:
            self._scaled = torch.empty(count, self.vocab_size, device=self.device)
            self._weights = torch.zeros(count, self._padded, device=self.device)
        scaled = torch.sub(logits, peaks, out=self._scaled[:count])
        scaled /= self._column([p.temperature for p in parameters])
        padded = self._weights[:count]
        weights = padded[:, : self.vocab_size]

        top_k = [p.top_k if 0 < p.top_k < self.vocab_size else 0 for p in parameters]
        top_p = [p.top_p for p in parameters]
        filters_nucleus = min(top_p) < 1.0
        if any(top_k) or filters_nucleus:
            likeliest = max([*top_k, self._nucleus_sizes()[0] if filters_nucleus else 1])
            top = scaled.topk(likeliest, dim=-1).values
            if any(top_k):
                kth = self._rows([max(k, 1) - 1 for k in top_k]).unsqueeze(1)
                bound = top.gather(1, kth)
                bound[self._rows([row for row, k in enumerate(top_k) if k == 0])] = -torch.inf
                scaled.masked_fill_(scaled < bound, -torch.inf)
                top.masked_fill_(top < bound, -torch.inf)
            torch.exp(scaled, out=weights)
            if filters_nucleus:
                bound = self._nucleus_bound(scaled, weights, top, top_p)
                weights.masked_fill_(scaled < bound, 0.0)
        else:
            torch.exp(scaled, out=weights)
        min_p = [p.min_p for p in parameters]
        if any(min_p):
            weights.masked_fill_(scaled < self._column(min_p).log(), 0.0)

        groups = padded.view(count, -1, _GROUP)
        sums = groups.sum(dim=-1).cumsum(dim=-1, dtype=torch.float64)
        target = self._column([b * 2.0**-_UNIFORM_BITS for b in bits], torch.float64) * sums[:, -1:]
        group = torch.searchsorted(sums, target, right=True).clamp_(max=groups.shape[1] - 1)
        target -= torch.where(group > 0, sums.gather(1, (group - 1).clamp_(min=0)), 0.0)
        inside = groups.gather(1, group.unsqueeze(2).expand(-1, 1, _GROUP)).squeeze(1)
        inside = inside.cumsum(dim=-1, dtype=torch.float64)
        # The group's sum was rounded differently from this one. Whatever lies between them goes to the last
        # token of the group that has any weight.
        target = torch.minimum(target, inside[:, -1:] * (1.0 - 2.0**-_UNIFORM_BITS))
        within = torch.searchsorted(inside, target, right=True).clamp_(max=_GROUP - 1)
        return (group * _GROUP + within).squeeze(1).clamp_(max=self.vocab_size - 1)

    def _nucleus_sizes(self) -> list[int]:
        sizes = [] if self.device.type == "cuda" else list(_NUCLEUS_SIZES)
        return [size for size in sizes if size < self.vocab_size] + [self.vocab_size]

    def _nucleus_bound(self, scaled: Tensor, weights: Tensor, top: Tensor, top_p: list[float]) -> Tensor:
        """``[n, 1]``: the scaled logit of the last token that top_p keeps, -inf where it is off."""
        total = weights.sum(dim=-1, keepdim=True, dtype=torch.float64)
        share = self._column([p if p < 1.0 else torch.inf for p in top_p], torch.float64)
        bound, reached = _last_within(top, total, share)
        for size in self._nucleus_sizes()[1:]:
            short = (~reached & (share <= 1.0)).squeeze(1).nonzero().squeeze(1)
            if size <= top.shape[1] or len(short) == 0:
                continue
            top_short = scaled[short].topk(size, dim=-1).values
            bound[short], reached[short] = _last_within(top_short, total[short], share[short])
        return bound.masked_fill_(share > 1.0, -torch.inf)

    def _logprobs(self, logits: Tensor, tokens: Tensor, tops: list[int]) -> list[TokenLogprobs]:
        normaliser = torch.logsumexp(logits, dim=-1, keepdim=True)
        chosen = (logits.gather(1, tokens.unsqueeze(1)) - normaliser).squeeze(1).tolist()
        values, ids = logits.topk(min(max(tops), self.vocab_size), dim=-1)
        alternatives = zip(ids.tolist(), (values - normaliser).tolist(), strict=True)
        return [
            TokenLogprobs(token, logprob, list(zip(row_ids[:top], row_values[:top], strict=True)))
            for token, logprob, top, (row_ids, row_values) in zip(
                tokens.tolist(), chosen, tops, alternatives, strict=True
            )
        ]


class _PenaltyTable:
    """Which tokens each penalised sequence has seen, and how often it generated them: two rows a sequence.

    Takes ``5 * vocab_size`` bytes for each of the most penalised sequences that ever ran at once.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._seen = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)
        self._counts = torch.zeros(0, vocab_size, dtype=torch.float32, device=device)
        self._free: list[int] = []

    def assign(self, prompt: NDArray[np.int32]) -> int:
        """Take a row for a sequence that has generated nothing yet."""
        if not self._free:
            rows = self._seen.shape[0]
            added = max(rows, 4)
            self._seen = torch.cat([self._seen, self._seen.new_zeros(added, self._seen.shape[1])])
            self._counts = torch.cat([self._counts, self._counts.new_zeros(added, self._counts.shape[1])])
            self._free = list(range(rows, rows + added))
        row = self._free.pop()
        self._seen[row] = False
        self._counts[row] = 0.0
        self._seen[row, torch.from_numpy(prompt.astype(np.int64)).to(self._seen.device)] = True
        return row

    def release(self, row: int) -> None:
        """Give a row back."""
        self._free.append(row)

    def count(self, rows: list[int], tokens: Tensor) -> None:
        """Note one generated token per row; the rows differ."""
        at = torch.tensor(rows, dtype=torch.int64, device=tokens.device)
        self._seen[at, tokens] = True
        self._counts[at, tokens] += 1.0

    def apply(
        self, logits: Tensor, rows: list[int], repetition: Tensor, presence: Tensor, frequency: Tensor
    ) -> Tensor:
        """``[n, vocab_size]`` logits after the penalties, each ``[n, 1]``."""
        at = torch.tensor(rows, dtype=torch.int64, device=logits.device)
        counts = self._counts[at]
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(self._seen[at], repeated, logits)
        return logits - frequency * counts - presence * (counts > 0)


def _argmax(logits: Tensor) -> Tensor:
    """``[S]`` int64, the first largest of each row; the first NaN where there is one."""
    if logits.device.type == "cpu":
        # 32 us for [8, 49152] on one core of an EPYC; torch's takes 570 us.
        return torch.from_numpy(logits.numpy().argmax(axis=-1))
    return logits.argmax(dim=-1)


def _take(tensor: Tensor, rows: list[int]) -> Tensor:
    """These rows, ascending; the tensor itself if they are all of it."""
    if len(rows) == tensor.shape[0]:
        return tensor
    return tensor[torch.tensor(rows, dtype=torch.int64, device=tensor.device)]


def _last_within(top: Tensor, total: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """From each row's likeliest scaled logits, falling: the first at which the sum reaches the share of the
    total, and whether one does (else the last)."""
    reached_share = top.exp().cumsum(dim=-1, dtype=torch.float64) >= share * total
    first = (~reached_share).sum(dim=-1, keepdim=True)
    reached = first < top.shape[1]
    return top.gather(1, first.clamp_(max=top.shape[1] - 1)), reached
