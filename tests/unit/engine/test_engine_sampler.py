"""The sampler against a slow, obvious reference in numpy, and against its own claimed distributions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from service.engine import sampler as sampler_module
from service.engine.protocol import SamplingParams
from service.engine.sampler import NonFiniteLogits, Sample, Sampler
from service.engine.sequence import ConstraintFailed, Sequence

Array = NDArray[np.float64]
CPU = torch.device("cpu")
EOS = 0


def sequence(
    prompt: list[int], name: str = "s", output: list[int] | None = None, **parameters: Any
) -> Sequence:
    sampling = SamplingParams(**({"max_tokens": 1000} | parameters))
    made = Sequence(name, prompt, sampling, eos_token_ids=(EOS,))
    for token in output or []:
        made.append_token(token)
    return made


def reference_processed(logits: Array, prompt: list[int], output: list[int], p: SamplingParams) -> Array:
    """Penalties, bias and mask, token by token."""
    result = logits.copy()
    for token in set(prompt) | set(output):
        result[token] = (
            result[token] / p.repetition_penalty
            if result[token] > 0
            else result[token] * p.repetition_penalty
        )
    for token in set(output):
        result[token] -= p.frequency_penalty * output.count(token) + p.presence_penalty
    for token, bias in p.logit_bias.items():
        result[token] += bias
    if len(output) < p.min_tokens:
        for token in {EOS, *p.stop_token_ids}:
            result[token] = -math.inf
    return result


def reference_probabilities(logits: Array, p: SamplingParams) -> Array:
    """The distribution after temperature and filters; ties with the last token kept are kept."""
    scaled = (logits - logits.max()) / p.temperature
    if p.top_k:
        kth = sorted(scaled, reverse=True)[min(p.top_k, len(scaled)) - 1]
        scaled = np.where(scaled >= kth, scaled, -math.inf)
    probabilities = np.exp(scaled) / np.exp(scaled).sum()
    if p.top_p < 1:
        total, last = 0.0, 0.0
        for probability in sorted(probabilities, reverse=True):
            total, last = total + probability, probability
            if total >= p.top_p:
                break
        probabilities = np.where(probabilities >= last, probabilities, 0.0)
    probabilities = np.where(probabilities >= p.min_p * probabilities.max(), probabilities, 0.0)
    return probabilities / probabilities.sum()


class Scripted:
    """Stands in for a sequence's generator: gives the number it was told."""

    def __init__(self, uniform: float) -> None:
        self.bits = int(uniform * 2**32)

    def getrandbits(self, count: int) -> int:
        assert count == 32
        return self.bits


def draw(
    engine: Sampler, logits: torch.Tensor, sequences: list[Sequence], uniforms: list[float]
) -> list[Sample]:
    """`sample` with the generators' next numbers given."""
    for made, uniform in zip(sequences, uniforms, strict=True):
        engine._state(made).rng = Scripted(uniform)  # type: ignore[assignment]
    return engine.sample(logits, sequences)


FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3},
    {"temperature": 2.5},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 10_000},
    {"top_p": 0.05},
    {"top_p": 0.7},
    {"top_p": 0.9999},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"top_k": 40, "top_p": 0.6},
    {"top_k": 40, "top_p": 0.8, "min_p": 0.05, "temperature": 1.7},
    {"logit_bias": {2: 3.0, 7: -100.0}},
    {"repetition_penalty": 1.8},
    {"presence_penalty": 1.5},
    {"frequency_penalty": -0.7},
    {"repetition_penalty": 0.8, "presence_penalty": -1.0, "frequency_penalty": 0.9, "top_p": 0.9},
    {"min_tokens": 20, "stop_token_ids": (1, 3), "logit_bias": {1: 50.0}},
]


# 1000 tokens: more than the first 256 that top_p looks at; 128 and 129: a full group and one more.
@pytest.mark.parametrize("vocab", [8, 128, 129, 1000])
@pytest.mark.parametrize("parameters", FILTERS, ids=str)
def test_draws_follow_reference(vocab: int, parameters: dict[str, Any]) -> None:
    """Where the uniform number falls in the reference's cumulative distribution is the token drawn."""
    rng = np.random.default_rng(vocab)
    engine = Sampler(vocab, CPU)
    uniforms = [0.0, 0.013, 0.37, 0.5, 0.81, 0.999, 1 - 2**-32]
    prompt, output = [1, 2, 5, 5], [4, 5, 6, 6, 6]
    logits = rng.normal(0, 2, vocab).astype(np.float32)
    sequences = []
    for index in range(len(uniforms)):
        # Output tokens reach the sampler's counts as they do in the engine: one step after the other.
        made = sequence(prompt, f"s{index}", **parameters)
        for token in output:
            forced = torch.full((1, vocab), -1e4)
            forced[0, token] = 1e4
            engine.sample(forced, [made])
            made.append_token(token)
        sequences.append(made)

    got = draw(engine, torch.from_numpy(np.tile(logits, (len(uniforms), 1))), sequences, uniforms)

    sampling = sequences[0].sampling
    want = reference_probabilities(
        reference_processed(logits.astype(np.float64), prompt, output, sampling), sampling
    )
    cumulative = np.concatenate([[0.0], np.cumsum(want)])
    for sample, uniform in zip(got, uniforms, strict=True):
        assert sample.error is None
        assert want[sample.token] > 0
        assert cumulative[sample.token] - 1e-5 <= uniform <= cumulative[sample.token + 1] + 1e-5


@pytest.mark.parametrize("parameters", [p for p in FILTERS if "temperature" not in p], ids=str)
def test_greedy_takes_the_largest_processed_logit(parameters: dict[str, Any]) -> None:
    logits = np.random.default_rng(3).normal(0, 2, 100).astype(np.float32)
    made = sequence([1, 2, 5, 5], temperature=0.0, **parameters)
    (sample,) = Sampler(100, CPU).sample(torch.from_numpy(logits)[None], [made])
    assert (
        sample.token
        == reference_processed(logits.astype(np.float64), [1, 2, 5, 5], [], made.sampling).argmax()
    )


def test_penalties_count_what_was_generated() -> None:
    """A frequency penalty of 1 on two tokens 2.5 apart: one is chosen three times, then they alternate."""
    engine = Sampler(8, CPU)
    made = sequence([3], temperature=0.0, frequency_penalty=1.0)
    logits = torch.tensor([[-9.0, -9.0, 2.5, -9.0, 0.0, -9.0, -9.0, -9.0]])
    tokens = []
    for _ in range(7):
        (sample,) = engine.sample(logits, [made])
        tokens.append(sample.token)
        made.append_token(sample.token)
    assert tokens == [2, 2, 2, 4, 2, 4, 2]


def test_penalties_start_anew_with_each_sequence() -> None:
    engine = Sampler(8, CPU)
    logits = torch.zeros(1, 8)
    logits[0, 3] = 1.0
    for _ in range(3):
        made = sequence([4], temperature=0.0, presence_penalty=1.5)
        tokens = []
        for _ in range(2):
            (sample,) = engine.sample(logits, [made])
            tokens.append(sample.token)
            made.append_token(sample.token)
        assert tokens == [3, 0]
        engine.forget(made.request_id)
        engine.forget(made.request_id)


def test_penalties_of_many_sequences() -> None:
    engine = Sampler(16, CPU)
    sequences = [sequence([i], f"s{i}", temperature=0.0, repetition_penalty=4.0) for i in range(9)]
    logits = torch.full((9, 16), -50.0)
    for i in range(9):
        logits[i, i] = 4.0  # seen in the prompt: 1.0 after the penalty
        logits[i, 15] = 2.0
    assert [sample.token for sample in engine.sample(logits, sequences)] == [15] * 9


def test_ties_at_the_bound_are_all_kept() -> None:
    logits = torch.zeros(1, 300)
    for parameters in ({"top_k": 3}, {"top_p": 0.01}, {"min_p": 1.0}):
        engine = Sampler(300, CPU)
        tokens = {
            draw(engine, logits, [sequence([1], f"{parameters}{u}", **parameters)], [u])[0].token
            for u in (0.0, 0.401, 0.999)
        }
        assert tokens == {0, 120, 299}


@pytest.mark.parametrize("find", [sampler_module._nucleus_by_sort, sampler_module._nucleus_by_histogram])
@pytest.mark.parametrize("share", [1e-9, 0.1, 0.5, 0.9, 0.999, 1 - 1e-12])
@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 10.0, 60.0])
def test_nucleus_bound_matches_reference(find: Any, share: float, spread: float) -> None:
    """From all weights equal to one that is all there is; the second row's share differs."""
    logits = np.random.default_rng(5).normal(0, 1, (2, 500)).astype(np.float32) * np.float32(spread)
    weights = torch.from_numpy(np.exp(logits - logits.max(axis=1, keepdims=True)))
    got = find(weights, [share, 0.3])
    for row, wanted in enumerate((share, 0.3)):
        falling = sorted(weights[row].double().tolist(), reverse=True)
        sums = np.cumsum(falling)
        assert float(got[row, 0]) == falling[int((sums < wanted * sums[-1]).sum())]


@pytest.mark.parametrize("parameters", [{}, {"temperature": 0.5}, {"top_p": 0.8}, {"top_k": 4}])
def test_seeded_draws_have_the_right_frequencies(parameters: dict[str, Any]) -> None:
    """Chi-square over 4000 draws; 45 is above the 0.99999 quantile for up to 11 degrees of freedom."""
    logits = np.random.default_rng(11).normal(0, 1, 12).astype(np.float32)
    engine = Sampler(12, CPU)
    made = sequence([1], seed=1234, **parameters)
    rows = torch.from_numpy(logits)[None]
    counts = np.zeros(12)
    for _ in range(4000):
        counts[engine.sample(rows, [made])[0].token] += 1
    want = reference_probabilities(logits.astype(np.float64), made.sampling) * 4000
    assert counts[want == 0].sum() == 0
    kept = want > 0
    assert ((counts[kept] - want[kept]) ** 2 / want[kept]).sum() < 45


def test_seed_decides_whatever_the_neighbours() -> None:
    """The same rows alone, first, last, and beside sequences with every filter."""
    vocab = 700
    rng = np.random.default_rng(2)
    steps = [torch.from_numpy(rng.normal(0, 2, (1, vocab)).astype(np.float32)) for _ in range(30)]

    def alone(**parameters: Any) -> list[int]:
        engine = Sampler(vocab, CPU, seed=1)
        made = sequence([1], **parameters)
        return [engine.sample(row, [made])[0].token for row in steps]

    for parameters in ({"seed": 7}, {"seed": 7, "top_p": 0.9}, {"seed": 7, "top_k": 9, "min_p": 0.01}):
        want = alone(**parameters)
        for at in (0, 3, len(FILTERS)):
            engine = Sampler(vocab, CPU, seed=99)
            company = [sequence([2], f"n{i}", **other) for i, other in enumerate(FILTERS)]
            company.insert(at, sequence([1], "mine", **parameters))
            got = []
            for row in steps:
                logits = torch.from_numpy(rng.normal(0, 2, (len(company), vocab)).astype(np.float32))
                logits[at] = row
                got.append(engine.sample(logits, company)[at].token)
            assert got == want
    assert alone(seed=7) != alone(seed=8)
    assert alone(seed=7) != alone(seed=-7)
    assert alone() == alone(), "without a seed, the engine's own decides"


@pytest.mark.parametrize("company", [{"temperature": 0.0}, {"top_p": 0.9}, {"repetition_penalty": 1.2}])
@pytest.mark.parametrize("bad", [math.nan, math.inf, "all masked"], ids=["nan", "inf", "masked"])
@pytest.mark.parametrize("parameters", [{"temperature": 0.0}, {}, {"top_p": 0.5}, {"logprobs": 2}], ids=str)
def test_bad_row_fails_alone(company: dict[str, Any], bad: float | str, parameters: dict[str, Any]) -> None:
    logits = torch.randn(3, 400, generator=torch.Generator().manual_seed(1))
    if bad == "all masked":
        logits[1] = -math.inf
    else:
        logits[1, 17] = bad
    sequences = [
        sequence([1], f"s{row}", seed=row, **(parameters if row == 1 else company)) for row in range(3)
    ]
    got = Sampler(400, CPU).sample(logits.clone(), sequences)
    assert got[1].error is not None
    assert got[0].error is None
    assert got[2].error is None
    fine = [sequence([1], f"s{row}", seed=row, **company) for row in (0, 2)]
    want = Sampler(400, CPU).sample(logits[[0, 2]], fine)
    assert [got[0].token, got[2].token] == [sample.token for sample in want]


def test_mask_does_not_hide_a_bad_logit() -> None:
    logits = torch.zeros(1, 8)
    logits[0, EOS] = math.nan
    (sample,) = Sampler(8, CPU).sample(logits, [sequence([1], min_tokens=2, temperature=0.0)])
    assert sample.error is not None


def test_minus_infinity_is_an_ordinary_logit() -> None:
    """A model may rule tokens out; they are never drawn and their log probability is -inf."""
    logits = torch.zeros(1, 200)
    logits[0, 3:] = -math.inf
    engine = Sampler(200, CPU)
    for uniform in (0.0, 0.5, 1 - 2**-32):
        made = sequence([1], f"{uniform}", logprobs=5, top_p=0.99)
        (sample,) = draw(engine, logits, [made], [uniform])
        assert sample.error is None
        assert sample.token < 3
        assert sample.logprobs is not None
        assert sample.logprobs.logprob == pytest.approx(-math.log(3))
        assert [math.isinf(logprob) for _, logprob in sample.logprobs.top] == [False] * 3 + [True] * 2


@pytest.mark.parametrize("temperature", [0.0, 1e-300, 1e-6, 1e-4])
def test_tiny_temperatures_are_greedy(temperature: float) -> None:
    logits = torch.randn(1, 500, generator=torch.Generator().manual_seed(4)) * 30
    (sample,) = draw(Sampler(500, CPU), logits, [sequence([1], temperature=temperature)], [0.999])
    assert sample.error is None
    assert sample.token == int(logits.argmax())


def test_logprobs_only_where_asked_for() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(4))
    sequences = [
        sequence([1], "a", temperature=0.0),
        sequence([1], "b", temperature=0.0, logprobs=0),
        sequence([1], "c", temperature=0.0, logprobs=3, repetition_penalty=2.0),
        sequence([1], "d", temperature=0.0, logprobs=60),
    ]
    got = Sampler(50, CPU).sample(logits, sequences)
    want = logits.double().log_softmax(-1)
    assert got[0].logprobs is None
    for row, count in ((1, 0), (2, 3), (3, 50)):
        entry = got[row].logprobs
        assert entry is not None
        assert entry.token_id == got[row].token
        assert entry.logprob == pytest.approx(float(want[row, got[row].token]), abs=1e-5)
        assert [token for token, _ in entry.top] == want[row].topk(count).indices.tolist()
        assert [logprob for _, logprob in entry.top] == pytest.approx(
            want[row].topk(count).values.tolist(), abs=1e-5
        )


# 64 rows are normalised at once.
@pytest.mark.parametrize("rows", [0, 1, 63, 64, 65, 200])
def test_prompt_logprobs_in_pieces(rows: int) -> None:
    logits = torch.randn(rows, 40, generator=torch.Generator().manual_seed(4))
    targets = [(7 * row) % 40 for row in range(rows)]
    got = Sampler(40, CPU).prompt_logprobs(logits, targets, 2)
    want = logits.double().log_softmax(-1)
    assert [entry.token_id for entry in got] == targets
    assert [entry.logprob for entry in got] == pytest.approx(want[range(rows), targets].tolist(), abs=1e-5)
    assert all(len(entry.top) == 2 for entry in got)


def test_prompt_logprobs_refuse_nan() -> None:
    logits = torch.zeros(3, 8)
    logits[2, 1] = math.nan
    with pytest.raises(NonFiniteLogits):
        Sampler(8, CPU).prompt_logprobs(logits, [1, 2, 3], 0)


def test_the_models_logits_are_not_changed() -> None:
    logits = torch.randn(len(FILTERS), 300, generator=torch.Generator().manual_seed(9))
    before = logits.clone()
    Sampler(300, CPU).sample(logits, [sequence([1], f"s{i}", **p) for i, p in enumerate(FILTERS)])
    assert torch.equal(logits, before)


class ScriptedConstraint:
    """A constraint that allows what it was told."""

    def __init__(self, *allowed: int | None) -> None:
        self.allowed = list(allowed)
        self.accepted: list[int] = []

    def fill(self, words: NDArray[np.int32]) -> bool:
        token = self.allowed.pop(0)
        if token is None:
            return False
        if token < 0:
            raise ConstraintFailed("told to fail")
        words[token // 32] |= np.int32(1) << np.int32(token % 32) if token % 32 != 31 else np.int32(-(2**31))
        return True

    def accept(self, token: int) -> None:
        self.accepted.append(token)


@pytest.mark.parametrize("vocab", [31, 32, 33, 417])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_the_rows_of_constrained_sequences_are_masked(vocab: int, temperature: float) -> None:
    """The last token of the vocabulary, one that fails, one that is free for a step, and a neighbour."""
    constraints = [
        ScriptedConstraint(vocab - 1, 0),
        ScriptedConstraint(-1, 2),
        ScriptedConstraint(None, 3),
        None,
    ]
    sampling = SamplingParams(max_tokens=9, temperature=temperature, seed=1)
    sequences = [Sequence(str(i), [1], sampling, constraint=c) for i, c in enumerate(constraints)]
    logits = torch.zeros(4, vocab)
    logits[:, 7] = 50.0
    before = logits.clone()
    sampler = Sampler(vocab, CPU)

    first = sampler.sample(logits, sequences)
    assert [sample.error for sample in first] == [None, "told to fail", None, None]
    assert [sample.token for sample in first if sample.error is None] == [vocab - 1, 7, 7]
    assert constraints[0].accepted == [vocab - 1]
    assert constraints[1].accepted == []
    assert [sample.token for sample in sampler.sample(logits, sequences)] == [0, 2, 3, 7]
    assert torch.equal(logits, before)
