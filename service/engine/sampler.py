"""Chooses the next token of each sequence of a step, all at once and on the device.

The order of what is done to a row of logits, each only where asked for:

1. repetition penalty on the tokens of prompt and output, then presence and frequency penalties on the
   output's;
2. logit_bias;
3. end and stop tokens are masked while there are fewer than min_tokens, and so are tokens that the
   sequence's constraint does not allow next;
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
from .sequence import ConstraintFailed, Sequence

# Below this the division by temperature leaves nothing of the second-likeliest token that float32 could show.
_GREEDY_TEMPERATURE = 1e-5

# Weights are at most 1.0 and not negative, so their float32 bits grow with them: the upper 12 make a
# histogram bin of each binade's eighths.
_HISTOGRAM_SHIFT = 20

# Bits of a uniform number: few enough that u < 1 survives every rounding below.
_UNIFORM_BITS = 32

# The cumulative distribution is taken in two steps, over groups of this many tokens and then within one
# group: a float64 running sum over 49152 tokens of 8 sequences takes 4.2 ms on one core of an EPYC, this 0.1
# ms.
_GROUP = 128

# Rows of prompt logits that are normalised at once, which bounds the extra memory.
_PROMPT_ROWS = 64

NON_FINITE = "the model gave logits that are not finite, or every token is masked, so no token can be chosen"


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

    __slots__ = ("bias_ids", "bias_values", "greedy", "plain", "rng", "seen", "stop_ids")

    def __init__(self, sequence: Sequence, engine_rng: random.Random) -> None:
        sampling = sequence.sampling
        self.greedy = sampling.temperature < _GREEDY_TEMPERATURE
        # random.Random takes the absolute value of an int, so a negative seed is mapped into 64 bits first.
        seed = None if sampling.seed is None else sampling.seed & (2**64 - 1)
        self.rng = engine_rng if seed is None else random.Random(seed)  # noqa: S311 (draws no secrets)
        penalised = (
            sampling.repetition_penalty != 1.0
            or sampling.presence_penalty != 0.0
            or sampling.frequency_penalty != 0.0
        )
        self.seen = _SeenTokens(sequence) if penalised else None
        self.bias_ids = list(sampling.logit_bias.keys())
        self.bias_values = list(sampling.logit_bias.values())
        self.stop_ids = sorted(sequence.stop_ids) if sampling.min_tokens else []
        self.plain = (
            self.greedy
            and sampling.logprobs is None
            and sequence.constraint is None
            and not (penalised or self.bias_ids or self.stop_ids)
        )


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
        # Buffers reused each step: fresh memory of this size costs more than what is computed in it. The
        # weights' columns past the vocabulary stay zero and fill the last group up.
        self._processed = _Rows(vocab_size, device)
        self._weights = _Rows(-(-vocab_size // _GROUP) * _GROUP, device)

    def forget(self, request_id: str) -> None:
        """Drop what is kept of a sequence; unknown ids are ignored."""
        self._states.pop(request_id, None)

    def takes_largest(self, sequence: Sequence) -> bool:
        """Whether `sample` would do nothing but take the largest logit, whatever came before."""
        return self._state(sequence).plain

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
        errors: dict[int, str] = {}
        processed = self._process(logits, sequences, states, errors)
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
        wanted = [row for row, sequence in enumerate(sequences) if sequence.sampling.logprobs is not None]
        logprobs: dict[int, TokenLogprobs] = {}
        if wanted:
            tops = [sequences[row].sampling.logprobs or 0 for row in wanted]
            found = self._logprobs(_take(logits, wanted), _take(tokens, wanted), tops)
            logprobs = dict(zip(wanted, found, strict=True))

        samples = []
        for row, (token, good) in enumerate(zip(tokens.tolist(), finite.tolist(), strict=True)):
            constraint = sequences[row].constraint
            if row not in errors and not good:
                errors[row] = NON_FINITE
            if constraint is not None and row not in errors:
                try:
                    constraint.accept(token)
                except ConstraintFailed as error:
                    errors[row] = str(error)
            samples.append(Sample(token, logprobs.get(row), errors.get(row)))
            seen = states[row].seen
            if seen is not None:
                seen.count(token)
        return samples

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
            state = self._states[sequence.request_id] = _State(sequence, self._rng)
        return state

    def _rows(self, rows: list[int]) -> Tensor:
        return torch.tensor(rows, dtype=torch.int64, device=self.device)

    def _process(
        self, logits: Tensor, sequences: list[Sequence], states: list[_State], errors: dict[int, str]
    ) -> Tensor:
        """Steps 1 to 3; the logits themselves if no sequence asks for any of them. `errors` takes why a row's
        constraint cannot go on."""
        penalised: list[int] = []
        biased_rows: list[int] = []
        biased_ids: list[int] = []
        biases: list[float] = []
        masked_rows: list[int] = []
        masked_ids: list[int] = []
        for row, (sequence, state) in enumerate(zip(sequences, states, strict=True)):
            if state.seen is not None:
                penalised.append(row)
            if state.bias_ids:
                biased_rows += [row] * len(state.bias_ids)
                biased_ids += state.bias_ids
                biases += state.bias_values
            if state.stop_ids and sequence.num_output < sequence.sampling.min_tokens:
                masked_rows += [row] * len(state.stop_ids)
                masked_ids += state.stop_ids
        constrained, allowed = self._allowed(sequences, errors)
        if not (penalised or biased_rows or masked_rows or constrained):
            return logits

        logits = self._processed.front(len(sequences)).copy_(logits)
        if penalised:
            self._penalise(logits, penalised, sequences, states)
        if biased_rows:
            added = torch.tensor(biases, dtype=torch.float32, device=self.device)
            logits.index_put_((self._rows(biased_rows), self._rows(biased_ids)), added, accumulate=True)
        if masked_rows:
            logits[self._rows(masked_rows), self._rows(masked_ids)] = -torch.inf
        if constrained:
            rows = self._rows(constrained)
            logits[rows] = logits[rows].masked_fill_(~_unpack_bits(allowed, self.vocab_size), -torch.inf)
        return logits

    def _allowed(self, sequences: list[Sequence], errors: dict[int, str]) -> tuple[list[int], Tensor]:
        """Rows whose constraint forbids some token, and for each a bit for each token: ``[n, words]``."""
        rows: list[int] = []
        masks: list[NDArray[np.int32]] = []
        for row, sequence in enumerate(sequences):
            if sequence.constraint is None:
                continue
            words = np.zeros(-(-self.vocab_size // 32), dtype=np.int32)
            try:
                if sequence.constraint.fill(words):
                    rows.append(row)
                    masks.append(words)
            except ConstraintFailed as error:
                errors[row] = str(error)
        packed = torch.from_numpy(np.stack(masks)) if masks else torch.zeros(0, 0, dtype=torch.int32)
        return rows, packed.to(self.device)

    def _penalise(
        self, logits: Tensor, penalised: list[int], sequences: list[Sequence], states: list[_State]
    ) -> None:
        """Step 1, in place. Only tokens that were seen change, so only they are touched."""
        seen = [tokens for row in penalised if (tokens := states[row].seen) is not None]
        sizes = [tokens.size for tokens in seen]
        parameters = np.repeat(
            np.array(
                [
                    (p.repetition_penalty, p.presence_penalty, p.frequency_penalty)
                    for p in (sequences[row].sampling for row in penalised)
                ],
                dtype=np.float32,
            ),
            sizes,
            axis=0,
        )
        rows = torch.from_numpy(np.repeat(np.array(penalised, dtype=np.int64), sizes)).to(self.device)
        ids = torch.from_numpy(np.concatenate([t.ids[: t.size] for t in seen])).to(self.device)
        counts = torch.from_numpy(np.concatenate([t.counts[: t.size] for t in seen])).to(self.device)
        repetition, presence, frequency = torch.from_numpy(parameters).to(self.device).unbind(dim=1)
        values = logits[rows, ids]
        values = torch.where(values > 0, values / repetition, values * repetition)
        logits[rows, ids] = values - frequency * counts - presence * (counts > 0)

    def _column(self, values: list[float], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device).unsqueeze(1)

    def _draw(
        self, logits: Tensor, peaks: Tensor, parameters: list[SamplingParams], bits: list[int]
    ) -> Tensor:
        """Steps 4 and 5 for rows that are not greedy: ``[n]`` int64. Rows that are not finite give any
        token."""
        count = len(parameters)
        padded = self._weights.front(count)
        weights = padded[:, : self.vocab_size]
        torch.sub(logits, peaks, out=weights)
        weights /= self._column([p.temperature for p in parameters])
        weights.exp_()  # the likeliest has weight 1

        top_k = [p.top_k if p.top_k < self.vocab_size else 0 for p in parameters]
        if any(top_k):
            kth = self._rows([max(k, 1) - 1 for k in top_k]).unsqueeze(1)
            bound = weights.topk(max(top_k), dim=-1).values.gather(1, kth)
            bound[self._rows([row for row, k in enumerate(top_k) if k == 0])] = 0.0
            _drop_below(weights, bound)
        bound = self._column([p.min_p for p in parameters])
        nuclear = [row for row, p in enumerate(parameters) if p.top_p < 1.0]
        if nuclear:
            find = _nucleus_by_histogram if self.device.type == "cpu" else _nucleus_by_sort
            rows = self._rows(nuclear)
            nucleus = find(_take(weights, nuclear), [parameters[row].top_p for row in nuclear])
            bound[rows] = torch.maximum(bound[rows], nucleus)
        if nuclear or any(p.min_p for p in parameters):
            _drop_below(weights, bound)

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


class _SeenTokens:
    """The distinct tokens of a penalised sequence, and how often each was generated.

    Attributes:
        ids: ``[>= size]`` int64.
        counts: ``[>= size]`` float32, 0 for tokens that only the prompt has.
    """

    __slots__ = ("_index", "counts", "ids", "size")

    def __init__(self, sequence: Sequence) -> None:
        prompt = np.unique(sequence.tokens[: sequence.prompt_length])
        self.size = len(prompt)
        self.ids: NDArray[np.int64] = prompt.astype(np.int64)
        self.counts: NDArray[np.float32] = np.zeros(self.size, dtype=np.float32)
        self._index = {token: index for index, token in enumerate(prompt.tolist())}

    def count(self, token: int) -> None:
        """Note one generated token."""
        index = self._index.setdefault(token, self.size)
        if index == self.size:
            if self.size == len(self.ids):
                added = max(32, self.size)
                self.ids = np.concatenate([self.ids, np.zeros(added, np.int64)])
                self.counts = np.concatenate([self.counts, np.zeros(added, np.float32)])
            self.ids[index] = token
            self.size += 1
        self.counts[index] += 1.0


class _Rows:
    """A buffer of float32 rows that grows to the most ever asked for, zeroed when it is made."""

    __slots__ = ("_device", "_tensor", "_width")

    def __init__(self, width: int, device: torch.device) -> None:
        self._width = width
        self._device = device
        self._tensor = torch.zeros(0, width, device=device)

    def front(self, count: int) -> Tensor:
        """``[count, width]``, with what was last written there."""
        if count > self._tensor.shape[0]:
            self._tensor = torch.zeros(count, self._width, device=self._device)
        return self._tensor[:count]


def _argmax(logits: Tensor) -> Tensor:
    """``[S]`` int64, the first largest of each row; the first NaN where there is one."""
    if logits.device.type == "cpu":
        # 32 us for [8, 49152] on one core of an EPYC; torch's takes 570 us.
        return torch.from_numpy(logits.numpy().argmax(axis=-1))
    return logits.argmax(dim=-1)


def _drop_below(weights: Tensor, bound: Tensor) -> None:
    """Set the weights ``[n, V]`` below a row's bound ``[n, 1]`` to zero."""
    if weights.device.type == "cpu":
        # 92 us for [8, 49152] on one core of an EPYC; masked_fill_ takes 490 us.
        array = weights.numpy()
        np.multiply(array, array >= bound.numpy(), out=array)
    else:
        weights.masked_fill_(weights < bound, 0.0)


def _unpack_bits(words: Tensor, count: int) -> Tensor:
    """``[n, count]`` bool from ``[n, ceil(count / 32)]`` int32, least significant bit first."""
    if words.device.type == "cpu":
        # 25 us a row of 49152 on one core of an EPYC; shifting in torch takes 120 us.
        bits = np.unpackbits(words.numpy().view(np.uint8), axis=1, count=count, bitorder="little")
        return torch.from_numpy(bits.view(np.bool_))
    shifts = torch.arange(32, dtype=torch.int32, device=words.device)
    return ((words.unsqueeze(-1) >> shifts) & 1).bool().flatten(1)[:, :count]


def _take(tensor: Tensor, rows: list[int]) -> Tensor:
    """These rows, ascending; the tensor itself if they are all of it."""
    if len(rows) == tensor.shape[0]:
        return tensor
    return tensor[torch.tensor(rows, dtype=torch.int64, device=tensor.device)]


def _nucleus_by_sort(weights: Tensor, shares: list[float]) -> Tensor:
    """``[n, 1]``: the weight of the last token that top_p keeps in each row of weights ``[n, V]``."""
    falling = weights.sort(dim=-1, descending=True).values
    sums = falling.cumsum(dim=-1, dtype=torch.float64)
    wanted = torch.tensor(shares, dtype=torch.float64, device=weights.device).unsqueeze(1) * sums[:, -1:]
    last = (sums < wanted).sum(dim=-1, keepdim=True).clamp_(max=weights.shape[1] - 1)
    return falling.gather(1, last)


def _nucleus_by_histogram(weights: Tensor, shares: list[float]) -> Tensor:
    """`_nucleus_by_sort` for a CPU: 0.1 ms a row of 49152 on one core of an EPYC, where sorting takes 3.7 ms.

    A histogram over the weights' upper bits tells in which bin the sum reaches the share; only that bin is
    sorted.
    """
    bounds = np.zeros((len(shares), 1), dtype=np.float32)
    for row, (values, share) in enumerate(zip(weights.numpy(), shares, strict=True)):
        if 2 * np.count_nonzero(values) < len(values):
            # What top_k dropped would all be added to one bin, each addition waiting for the last.
            values = values[values != 0]
        bins = values.view(np.uint32) >> _HISTOGRAM_SHIFT
        sums = np.bincount(bins, weights=values)[::-1].cumsum()
        wanted = share * sums[-1]
        if not wanted < np.inf:  # a row with NaN, which is reported elsewhere
            continue
        reached = int(np.searchsorted(sums, wanted))
        before = sums[reached - 1] if reached else 0.0
        inside = np.sort(values[bins == len(sums) - 1 - reached])[::-1]
        # Rounding may leave the bin's own sum just short of what the histogram promised.
        last = min(int(np.searchsorted(before + inside.cumsum(dtype=np.float64), wanted)), len(inside) - 1)
        bounds[row] = inside[last]
    return torch.from_numpy(bounds)
