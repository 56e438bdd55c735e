"""Rows of a full batch cost time: what is drafted then, what is not, and what probing may cost."""

import random
from dataclasses import replace

import pytest

from decode.control.controller import (
    PROBE_SHARE,
    ControlledChoice,
    DraftLengthController,
    PlanEntry,
)
from decode.control.draft_length import DraftCandidate, StepCosts, choose_draft_lengths, seconds_at

FULL = [0.0, *(0.024 * max(1.0, rows / 12) + 0.0002 * rows for rows in range(1, 600))]
"""A step whose rows are nearly free up to 12, and dear behind."""
GIVEN = ControlledChoice(0, "ngram", "chat", 8, 4, start_length=8)


def loaded(batch: int, **changes: object) -> DraftLengthController:
    controller = DraftLengthController(599, dict(enumerate(FULL[1:], start=1)))
    for key in range(batch):
        controller.add(replace(GIVEN, key=key, **changes))  # type: ignore[arg-type]
    return controller


def run(
    controller: DraftLengthController, batch: int, steps: int, rate: float
) -> tuple[list[list[int]], float]:
    """K of each choice in each step, and tokens a second over those of plain decoding."""
    generator = random.Random(batch)
    entries = [PlanEntry(key, 8) for key in range(batch)]
    drafted: list[list[int]] = []
    tokens = seconds = 0.0
    for _ in range(steps):
        lengths = controller.plan(entries)
        for key, length in enumerate(lengths):
            accepted = 0
            while accepted < length and generator.random() < rate:
                accepted += 1
            controller.observe(key, length, accepted)
            tokens += 1 + accepted
        seconds += FULL[batch + sum(lengths)]
        drafted.append(lengths)
    return drafted, tokens / seconds / (batch / FULL[batch])


def test_with_little_accepted_a_batch_of_32_drafts_nothing() -> None:
    drafted, speed = run(loaded(32), 32, 600, 0.1)
    assert drafted[0] == [0] * 32, "not even the first K that the policy gives"
    rows = sum(map(sum, drafted))
    assert rows < 0.01 * 32 * 600, "probes are all there is"
    assert speed > 0.99


def test_with_much_accepted_one_choice_alone_drafts_deep() -> None:
    drafted, speed = run(loaded(1, start_length=2), 1, 400, 0.9)
    assert drafted[0] == [2]
    assert sum(length for (length,) in drafted[-100:]) / 100 > 6
    assert speed > 3.0


def test_no_rate_makes_a_loaded_batch_slower_than_plain_decoding() -> None:
    for batch in (8, 32):
        for rate in (0.02, 0.1, 0.3, 0.5, 0.7, 0.9):
            _, speed = run(loaded(batch), batch, 400, rate)
            assert speed > 0.98, (batch, rate)


def test_a_batch_that_fills_up_stops_drafting_at_once_whatever_the_dwell() -> None:
    held = DraftCandidate("ngram", (0.8,) * 8, current=6, steps_since_change=0, dwell_steps=256)
    assert choose_draft_lengths([held], StepCosts(FULL, {})) == [6]
    assert choose_draft_lengths([held] * 32, StepCosts(FULL, {})) == [0] * 32


def test_tokens_of_those_who_do_not_draft_are_delayed_too() -> None:
    held = DraftCandidate("ngram", (0.7,) * 8, current=2, steps_since_change=99)
    beside_prompts = StepCosts(FULL, {}, other_rows=31)
    beside_answers = StepCosts(FULL, {}, other_rows=31, other_tokens=31)
    assert choose_draft_lengths([held], beside_prompts)[0] > 0
    assert choose_draft_lengths([held], beside_answers) == [0]


def test_a_first_length_is_taken_where_it_is_not_expected_to_lose() -> None:
    fresh = DraftCandidate("ngram", (0.6,) * 8, start=8)
    assert choose_draft_lengths([fresh], StepCosts(FULL, {})) == [8]
    assert choose_draft_lengths([fresh] * 32, StepCosts(FULL, {})) == [0] * 32
    dear = StepCosts(FULL, {"ngram": [0.01 * depth for depth in range(9)]})
    assert choose_draft_lengths([fresh], dear)[0] < 8


def test_probes_of_a_batch_share_a_budget_of_its_time() -> None:
    steps, batch = 2000, 32
    drafted, _ = run(loaded(batch), batch, steps, 0.0)
    cost_s = sum(FULL[batch + sum(lengths)] - FULL[batch] for lengths in drafted)
    assert 0.0 < cost_s <= 1.01 * PROBE_SHARE * steps * FULL[batch]
    probed = {key for lengths in drafted for key, length in enumerate(lengths) if length}
    assert len(probed) == batch, "everyone had a turn"


def test_probes_pay_for_their_drafter() -> None:
    def probes(draft_s: float) -> int:
        controller = loaded(1, start_length=0)
        controller.record_draft("ngram", 2, draft_s)
        drafted, _ = run(controller, 1, 1000, 0.0)
        return sum(length > 0 for (length,) in drafted)

    assert probes(0.03) < probes(0.0001)


def test_a_drafter_comes_back_when_the_batch_empties() -> None:
    controller = loaded(32)
    run(controller, 32, 200, 0.9)
    for key in range(1, 32):
        controller.remove(key)
    drafted, _ = run(controller, 1, 300, 0.9)
    assert sum(length for (length,) in drafted[-50:]) / 50 > 6


def test_rows_beyond_the_largest_step_are_not_free() -> None:
    table = FULL[:257]
    sure = DraftCandidate("ngram", (0.8,) * 8)
    assert seconds_at(table, 256) == FULL[256]
    assert seconds_at(table, 300) == pytest.approx(FULL[300])
    assert seconds_at(table, 2.5) == pytest.approx((FULL[2] + FULL[3]) / 2)
    assert seconds_at([0.5], 3) == 0.5
    assert choose_draft_lengths([sure] * 200, StepCosts(table, {})) == [0] * 200
