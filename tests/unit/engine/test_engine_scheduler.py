"""Single decisions of the scheduler; the state machine in tests/property says only that all goes well."""

from __future__ import annotations

from typing import Any

from service.engine.protocol import SamplingParams
from service.engine.scheduler import Scheduler, StepPlan
from service.engine.sequence import Sequence


def scheduler(**changes: Any) -> Scheduler:
    defaults = {
        "num_blocks": 16,
        "block_size": 4,
        "max_num_sequences": 4,
        "max_step_tokens": 10,
        "max_model_len": 64,
    }
    return Scheduler(**(defaults | changes))


def add(engine: Scheduler, name: str, prompt: list[int], **parameters: Any) -> Sequence:
    sequence = Sequence(name, prompt, SamplingParams(**({"max_tokens": 50} | parameters)))
    engine.add(sequence)
    return sequence


def step(engine: Scheduler) -> StepPlan:
    """Run a step of a model that always says 7."""
    plan = engine.schedule()
    engine.commit(plan)
    for chunk in plan.chunks:
        if chunk.completes and engine.append(chunk.sequence, 7) is not None:
            engine.finish(chunk.sequence)
    return plan


def shape(plan: StepPlan) -> list[tuple[str, int, int]]:
    return [(chunk.sequence.request_id, chunk.start, chunk.length) for chunk in plan.chunks]


def test_decoding_goes_first_and_prompts_fill_the_step_in_order_of_arrival() -> None:
    engine = scheduler()
    add(engine, "a", [1])
    assert step(engine).phase == "prefill"
    add(engine, "b", [2] * 13)
    add(engine, "c", [3] * 5)
    plan = step(engine)
    assert shape(plan) == [("a", 1, 1), ("b", 0, 9)]
    assert plan.phase == "mixed"
    assert shape(step(engine)) == [("a", 2, 1), ("b", 9, 4), ("c", 0, 5)]
    plan = step(engine)
    assert shape(plan) == [("a", 3, 1), ("b", 13, 1), ("c", 5, 1)]
    assert plan.phase == "decode"


def test_prompt_that_fills_its_blocks_takes_the_next_when_it_decodes() -> None:
    engine = scheduler()
    sequence = add(engine, "a", [1] * 8)
    step(engine)
    assert sequence.num_blocks == 2
    step(engine)
    assert sequence.num_blocks == 3


def test_block_that_is_half_computed_is_not_found() -> None:
    """The step's budget ends in the middle of the third block; who did that leaves, the blocks stay."""
    engine = scheduler()
    prompt = list(range(30))
    add(engine, "a", prompt)
    step(engine)
    engine.abort("a")
    again = add(engine, "b", prompt)
    assert shape(step(engine)) == [("b", 8, 10)]
    assert again.cached_tokens == 8


def test_same_beginning_is_shared_while_it_is_in_use() -> None:
    engine = scheduler(max_step_tokens=40)
    add(engine, "a", [1] * 9)
    step(engine)
    add(engine, "b", [1] * 9)
    assert shape(step(engine)) == [("a", 9, 1), ("b", 8, 1)]
    assert engine.pool.num_used == 4, "two shared, one more for each"


def test_latest_arrival_is_preempted_and_recomputed_with_its_output() -> None:
    engine = scheduler(num_blocks=5, enable_prefix_caching=False)
    first, second = add(engine, "a", [1] * 3), add(engine, "b", [2] * 3)
    for _ in range(6):
        step(engine)
    assert (first.num_blocks, second.num_blocks) == (2, 2)
    for _ in range(3):
        plan = step(engine)
    assert shape(plan) == [("a", 10, 1)], (
        "the fifth block is the first's, and the second's turn to need one came"
    )
    assert list(engine.waiting) == [second]
    assert engine.preemptions == 1
    kept = second.tokens[: second.num_tokens].tolist()
    engine.finish(first)
    assert shape(step(engine)) == [("b", 0, 9)]
    assert second.tokens[:9].tolist() == kept


def test_room_is_left_for_those_who_run() -> None:
    """Three blocks of five are free and the newcomer needs three; who runs would push it out at once."""
    engine = scheduler(num_blocks=5)
    add(engine, "a", [1] * 7)
    step(engine)
    add(engine, "b", [2] * 12)
    assert shape(step(engine)) == [("a", 7, 1)]
    engine.abort("a")
    assert shape(step(engine)) == [("b", 0, 10)]


def test_max_tokens_zero_needs_no_sample() -> None:
    engine = scheduler()
    add(engine, "a", [1] * 5, max_tokens=0, prompt_logprobs=0)
    (chunk,) = engine.schedule().chunks
    assert chunk.completes
    assert not chunk.decodes
