"""The K controller: the best K for measured times, few switches, a way back from 0 (CASES B42)."""

import itertools
import math
import random
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest

from decode.control.acceptance import FIRST_GUESS, AcceptanceStats
from decode.control.controller import (
    LONGEST_PROBE_STEPS,
    ControlledChoice,
    DraftLengthController,
    PlanEntry,
)
from decode.control.draft_length import DraftCandidate, StepCosts, choose_draft_lengths

FLAT = [0.010] * 65
LINEAR = [0.010 * rows for rows in range(65)]
TYPICAL = [0.0 if rows == 0 else 0.009 + 0.0004 * rows for rows in range(65)]


def candidate(rate: float, room: int = 8, **changes: object) -> DraftCandidate:
    return replace(DraftCandidate("ngram", (rate,) * room), **changes)  # type: ignore[arg-type]


def best_length_by_hand(rate: float, room: int, table: list[float], draft: list[float]) -> int:
    """argmax of (1 - a^(K+1)) / (1 - a) / (T(K + 1) + T_draft(K))."""

    def tokens_per_second(length: int) -> float:
        return (
            (1 - rate ** (length + 1)) / (1 - rate) / (table[length + 1] + (draft[length] if length else 0.0))
        )

    return max(range(room + 1), key=tokens_per_second)


@pytest.mark.parametrize("rate", [0.05, 0.2, 0.5, 0.7, 0.9, 0.97])
@pytest.mark.parametrize("draft_seconds", [0.0, 0.0008, 0.003])
def test_one_choice_gets_the_length_that_the_formula_says(rate: float, draft_seconds: float) -> None:
    draft = [draft_seconds * depth for depth in range(9)]
    costs = StepCosts(TYPICAL, {"ngram": draft})
    expected = best_length_by_hand(rate, 8, TYPICAL, draft)
    assert choose_draft_lengths([candidate(rate)], costs) == [expected]


def test_free_rows_are_all_used_and_dear_ones_are_not() -> None:
    assert choose_draft_lengths([candidate(0.5)], StepCosts(FLAT, {})) == [6], (
        "a node under 1 % is not worth a row"
    )
    assert choose_draft_lengths([candidate(0.5)], StepCosts(LINEAR, {})) == [0]


def test_a_batch_spends_its_rows_on_those_who_accept() -> None:
    lengths = choose_draft_lengths([candidate(0.9), candidate(0.1)], StepCosts(TYPICAL, {}))
    assert lengths[0] > lengths[1]
    assert lengths[1] == 0


def test_load_gates_drafting_where_rows_stop_being_free() -> None:
    step = [0.010] * 17 + [0.010 + 0.002 * rows for rows in range(1, 48)]
    alone = choose_draft_lengths([candidate(0.5)], StepCosts(step, {}))
    loaded = choose_draft_lengths([candidate(0.5)] * 16, StepCosts(step, {}))
    assert alone[0] >= 3
    assert max(loaded) == 0
    behind_prefill = choose_draft_lengths([candidate(0.5)], StepCosts(step, {}, other_rows=40))
    assert behind_prefill[0] < alone[0]


def test_a_drafter_that_costs_more_than_it_brings_is_left_out_beside_one_that_pays() -> None:
    dear = DraftCandidate("draft_model", (0.9,) * 4)
    costs = StepCosts(TYPICAL, {"draft_model": [0.0, 0.05, 0.1, 0.15, 0.2]})
    lengths = choose_draft_lengths([dear, candidate(0.6), candidate(0.6)], costs)
    assert lengths[0] == 0
    assert lengths[1] > 0
    assert lengths[2] > 0


def rate_by_hand(candidates: list[DraftCandidate], lengths: Sequence[int], costs: StepCosts) -> float:
    """Expected tokens a second, straight from the definition."""
    tokens, rows = 0.0, costs.other_rows
    for drafting, length in zip(candidates, lengths, strict=True):
        tokens += sum(math.prod(drafting.rates[:depth]) for depth in range(length + 1))
        rows += 1 + (drafting.auxiliary_rows + drafting.width * length if length else 0)
    draft = 0.0
    for name, table in costs.drafters.items():
        longest = max((k for c, k in zip(candidates, lengths, strict=True) if c.drafter == name), default=0)
        draft += table[longest] if longest else 0.0
    return tokens / (costs.target[int(rows)] + draft)


def best_rate_by_hand(candidates: list[DraftCandidate], costs: StepCosts) -> float:
    rooms = [range(len(drafting.rates) + 1) for drafting in candidates]
    return max(rate_by_hand(candidates, lengths, costs) for lengths in itertools.product(*rooms))


def random_candidates(generator: random.Random, count: int, *, unlike: bool) -> list[DraftCandidate]:
    width, auxiliary = generator.randint(1, 4), 0
    candidates = []
    for _ in range(count):
        if unlike:
            width, auxiliary = generator.randint(1, 4), generator.choice([0, 0, 3, 7, 20])
        rates = tuple(generator.uniform(0.35, 0.97) for _ in range(generator.randint(1, 4)))
        name = f"lookahead-{width}" if auxiliary else "ngram"
        candidates.append(DraftCandidate(name, rates, width=width, auxiliary_rows=auxiliary))
    return candidates


def random_table(generator: random.Random, *, affine: bool) -> list[float]:
    """Seconds by rows: a straight line, or any way up, flats and cliffs included."""
    if affine:
        slope = generator.choice([0.0, 0.0002, 0.001, 0.004])
        return [0.01 + slope * rows for rows in range(400)]
    climbs = (generator.choice([0.0, 0.0, 0.0, 0.0004, 0.003]) for _ in range(400))
    return list(itertools.accumulate(climbs, initial=0.01))


@pytest.mark.parametrize("seed", range(40))
def test_rows_of_one_price_and_any_rows_at_affine_cost_give_the_global_maximum(seed: int) -> None:
    generator = random.Random(seed)
    for unlike, affine in ((False, False), (False, True), (True, True)):
        candidates = random_candidates(generator, 4, unlike=unlike)
        costs = StepCosts(random_table(generator, affine=affine), {}, other_rows=generator.randrange(30))
        rate = rate_by_hand(candidates, choose_draft_lengths(candidates, costs), costs)
        assert rate == pytest.approx(best_rate_by_hand(candidates, costs), rel=1e-9)


@pytest.mark.parametrize("seed", range(40))
def test_one_choice_with_auxiliary_rows_gets_the_global_maximum_at_any_cost(seed: int) -> None:
    generator = random.Random(seed)
    (drafting,) = random_candidates(generator, 1, unlike=True)
    draft = [0.0, *sorted(generator.uniform(0.0, 0.004) for _ in range(4))]
    costs = StepCosts(random_table(generator, affine=False), {drafting.drafter: draft})
    (length,) = choose_draft_lengths([drafting], costs)
    assert rate_by_hand([drafting], [length], costs) == pytest.approx(best_rate_by_hand([drafting], costs))


@pytest.mark.parametrize("seed", range(40))
def test_unlike_rows_at_any_cost_miss_one_draft_of_the_batch_at_most(seed: int) -> None:
    generator = random.Random(seed)
    candidates = random_candidates(generator, 4, unlike=True)
    costs = StepCosts(random_table(generator, affine=False), {})
    rate = rate_by_hand(candidates, choose_draft_lengths(candidates, costs), costs)
    one_draft = max(
        sum(math.prod(drafting.rates[:depth]) for depth in range(1, len(drafting.rates) + 1))
        for drafting in candidates
    )
    assert rate >= best_rate_by_hand(candidates, costs) * (1 - one_draft / len(candidates))


def test_auxiliary_rows_are_paid_before_the_first_token() -> None:
    step = [0.0, *(0.010 + 0.0005 * rows for rows in range(1, 64))]
    free = choose_draft_lengths([candidate(0.6, room=2)], StepCosts(step, {}))
    assert free == [2]
    window = candidate(0.6, room=2, auxiliary_rows=7)
    assert choose_draft_lengths([window], StepCosts(step, {})) == [2], "1.96 tokens for 10 rows"
    assert choose_draft_lengths([replace(window, auxiliary_rows=40)], StepCosts(step, {})) == [0]
    assert choose_draft_lengths([replace(window, width=20)], StepCosts(step, {})) == [0]


def test_rows_of_held_choices_load_the_step() -> None:
    cliff = [0.010] * 16 + [0.030] * 64
    held = candidate(0.9, room=2, fixed=2, width=3, auxiliary_rows=7)
    (_, moved) = choose_draft_lengths([held, candidate(0.9, room=4)], StepCosts(cliff, {}))
    assert moved == 0, "root, window and nodes of the one and the root of the other are 15 rows"
    (_, moved) = choose_draft_lengths([replace(held, width=1), candidate(0.9, room=4)], StepCosts(cliff, {}))
    assert moved == 4


def test_fixed_lengths_are_used_as_given_and_cut_by_room_only() -> None:
    costs = StepCosts(LINEAR, {})
    assert choose_draft_lengths([candidate(0.01, fixed=5), candidate(0.5, room=2, fixed=5)], costs) == [5, 2]
    assert choose_draft_lengths([candidate(0.9, fixed=0)], StepCosts(FLAT, {})) == [0]


def test_a_change_waits_for_its_dwell_unless_much_is_to_be_won() -> None:
    costs = StepCosts(TYPICAL, {})
    best = best_length_by_hand(0.7, 8, TYPICAL, [0.0] * 9)
    near = best - 1
    held = candidate(0.7, current=near, steps_since_change=9, dwell_steps=64)
    assert choose_draft_lengths([held], costs) == [near]
    far = replace(held, current=0)
    assert choose_draft_lengths([far], costs) == [best], "a gain over 10 % overrides a grown dwell"
    assert choose_draft_lengths([replace(far, steps_since_change=3)], costs) == [0]


def test_gains_under_one_percent_change_nothing() -> None:
    costs = StepCosts(TYPICAL, {})
    best = best_length_by_hand(0.7, 8, TYPICAL, [0.0] * 9)
    held = candidate(0.7, current=best + 1, steps_since_change=1000)
    assert choose_draft_lengths([held], costs) == [best + 1]


def test_a_single_choice_in_a_large_batch_still_moves() -> None:
    settled = [candidate(0.05, current=0, steps_since_change=99) for _ in range(15)]
    waking = candidate(0.9, current=0, steps_since_change=99)
    lengths = choose_draft_lengths([*settled, waking], StepCosts(TYPICAL, {}))
    assert lengths[:15] == [0] * 15
    assert lengths[15] > 0


def test_no_room_means_no_draft() -> None:
    assert choose_draft_lengths([candidate(0.9, room=0)], StepCosts(FLAT, {})) == [0]
    assert choose_draft_lengths([], StepCosts(FLAT, {})) == []


def test_the_conditional_rate_counts_only_steps_that_accepted_the_depth_before() -> None:
    stats = AcceptanceStats(3, decay=0.9999, prior_trials=0.01)
    for _ in range(50):
        stats.observe(3, 1)
        stats.observe(3, 3)
    assert stats.rates == pytest.approx((0.999, 0.5, 0.999), abs=0.01)


def test_rates_without_samples_are_hopeful_and_nothing_offered_says_nothing() -> None:
    stats = AcceptanceStats(4)
    stats.observe(0, 0)
    assert stats.rates == (FIRST_GUESS,) * 4
    stats.observe(99, 99)
    assert len(stats.rates) == 4
    assert all(0.0 < rate < 1.0 for rate in stats.rates)


def test_old_acceptance_fades() -> None:
    stats = AcceptanceStats(1)
    for _ in range(500):
        stats.observe(1, 1)
    for _ in range(120):
        stats.observe(1, 0)
    assert stats.rates[0] < 0.05


def controller_with(choices: int = 1, **changes: object) -> DraftLengthController:
    controller = DraftLengthController(64, dict(enumerate(TYPICAL[1:33], start=1)))
    for key in range(choices):
        controller.add(replace(ControlledChoice(key, "ngram", "chat", 8, 4), **changes))  # type: ignore[arg-type]
    return controller


def run(controller: DraftLengthController, rates: list[float], generator: random.Random) -> list[int]:
    """One step for each rate; K of each."""
    lengths = []
    for rate in rates:
        (length,) = controller.plan([PlanEntry(0, 8)])
        accepted = 0
        while accepted < length and generator.random() < rate:
            accepted += 1
        controller.observe(0, length, accepted)
        controller.record_step(length + 1, TYPICAL[length + 1] * generator.uniform(0.95, 1.05))
        lengths.append(length)
    return lengths


def switches(lengths: list[int]) -> int:
    """Changes of K, probes apart."""
    drafting = [length for length in lengths if length > 0]
    return sum(a != b for a, b in itertools.pairwise(drafting))


@pytest.mark.parametrize("seed", range(5))
def test_a_stream_that_hovers_at_a_pivot_switches_few_times(seed: int) -> None:
    generator = random.Random(seed)
    hovering = [0.62 if (step // 10) % 2 else 0.72 for step in range(5000)]
    lengths = run(controller_with(), hovering, generator)
    assert switches(lengths) <= 60, "5,000 steps are about a minute"


@pytest.mark.parametrize("seed", range(5))
def test_it_settles_within_a_hundred_steps_of_a_real_change(seed: int) -> None:
    generator = random.Random(seed)
    controller = controller_with()
    run(controller, [0.9] * 600, generator)
    low = run(controller, [0.01] * 400, generator)
    assert sum(low[100:]) / 300 < 1.0
    high = run(controller, [0.95] * 900, generator)
    assert sum(high[-200:]) / 200 > 4.0, "a drafter that was switched off came back"


def test_at_zero_it_probes_and_ever_more_rarely_while_probes_fail() -> None:
    lengths = run(controller_with(), [0.0] * 3000, random.Random(0))
    drafted = [step for step, length in enumerate(lengths) if length > 0]
    gaps = [b - a for a, b in itertools.pairwise(drafted)]
    assert gaps[-1] == LONGEST_PROBE_STEPS + 1
    assert max(lengths[500:]) <= 2


def test_a_stream_without_samples_or_with_broken_times_keeps_its_length() -> None:
    controller = controller_with()
    (first,) = controller.plan([PlanEntry(0, 8)])
    for _ in range(300):
        (length,) = controller.plan([PlanEntry(0, 8)])
        controller.observe(0, 0, 0)
        controller.record_step(length + 1, math.nan)
        assert length == first


def test_room_cuts_a_step_without_moving_the_length() -> None:
    controller = controller_with()
    run(controller, [0.9] * 200, random.Random(1))
    (usual,) = controller.plan([PlanEntry(0, 8)])
    assert controller.plan([PlanEntry(0, 1)]) == [1]
    assert controller.plan([PlanEntry(0, 0)]) == [0]
    assert controller.plan([PlanEntry(0, 8)]) == [usual]


def test_a_start_length_is_used_first_and_a_fixed_length_always() -> None:
    assert controller_with(start_length=3).plan([PlanEntry(0, 8)]) == [3]
    fixed = controller_with(fixed=7)
    assert set(run(fixed, [0.0] * 100, random.Random(0))) == {7}
    assert set(run(controller_with(fixed=0), [0.0] * 100, random.Random(0))) == {0}


def test_before_any_measurement_the_default_length_is_used() -> None:
    controller = DraftLengthController(64)
    controller.add(ControlledChoice(0, "ngram", "chat", 8, 4))
    assert controller.plan([PlanEntry(0, 8)]) == [4]


def test_a_new_choice_starts_from_what_its_class_showed() -> None:
    controller = controller_with()
    run(controller, [0.02] * 600, random.Random(0))
    controller.add(ControlledChoice(1, "ngram", "chat", 8, 4))
    controller.add(ControlledChoice(2, "ngram", "code", 8, 4))
    same_class, other_class = controller.plan([PlanEntry(1, 8), PlanEntry(2, 8)])
    assert same_class < other_class


def test_removed_choices_leave_nothing_behind() -> None:
    controller = controller_with(2)
    controller.remove(0)
    controller.remove(0)
    with pytest.raises(AssertionError, match="left in the controller"):
        controller.check()
    controller.remove(1)
    controller.check()


def test_the_controller_knows_the_rows_of_a_choice() -> None:
    step = {rows: 0.010 + 0.0008 * rows for rows in range(1, 65)}
    controller = DraftLengthController(64, step)
    controller.add(ControlledChoice(0, "ngram", "chat", 4, 4))
    controller.add(ControlledChoice(1, "lookahead", "chat", 2, 2, width=3, auxiliary_rows=40))
    chain, window = controller.plan([PlanEntry(0, 4), PlanEntry(1, 2)])
    assert chain > 0
    assert window == 0


@pytest.mark.parametrize("rows", [{}, {"width": 3, "auxiliary_rows": 7}], ids=["chains", "windows"])
def test_planning_a_batch_of_eight_is_cheap(rows: dict[str, int]) -> None:
    controller = controller_with(8, **rows)
    entries = [PlanEntry(key, 8) for key in range(8)]
    started = time.process_time()
    for _ in range(400):
        controller.plan(entries)
    assert (time.process_time() - started) / 400 < 500e-6, (
        "50 µs on a quiet machine; ten times that for a loaded one"
    )
