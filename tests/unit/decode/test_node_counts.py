"""What drafts are made of, by depth, and what the controller makes of trees, early ends and missing drafts."""

import math
import random
from dataclasses import replace

import pytest

from decode.control.acceptance import OfferedShare
from decode.control.controller import ControlledChoice, DraftLengthController, PlanEntry
from decode.control.draft_length import DraftCandidate, StepCosts, choose_draft_lengths
from decode.control.node_counts import NodeCounts

RISING = [0.010 + 0.0008 * rows for rows in range(400)]
TREE = ControlledChoice(0, "eagle2", "chat", 8, 4, width=4)


def test_a_chain_has_exactly_one_node_at_each_depth() -> None:
    counts = NodeCounts(8, 1)
    assert counts.means == (1.0,) * 8
    for depth in (3, 8, 1, 5) * 50:
        counts.observe(depth, [1] * depth)
    assert counts.means == (1.0,) * 8


def test_a_tree_has_what_it_had_and_depths_never_asked_for_are_like_the_one_before() -> None:
    counts = NodeCounts(6, 4)
    assert counts.means == (4.0,) * 6
    for _ in range(2000):
        counts.observe(4, [4, 2])
    first, second, third, *deeper = counts.means
    assert (first, second) == pytest.approx((4.0, 2.0), abs=0.01)
    assert third < 0.01, "asked for and never there"
    assert deeper[1:] == [deeper[1]] * 2
    counts.observe(99, [1] * 99)
    assert len(counts.means) == 6


def test_the_offered_share_follows_what_comes() -> None:
    share = OfferedShare()
    assert share.value == 1.0
    for _ in range(300):
        share.observe(offered=False)
    assert share.value < 0.01
    for _ in range(300):
        share.observe(offered=True)
    assert share.value > 0.99


@pytest.mark.parametrize("seed", range(40))
def test_one_draft_of_any_shape_gets_the_global_maximum_at_any_cost(seed: int) -> None:
    generator = random.Random(seed)
    depth = generator.randint(1, 6)
    drafting = DraftCandidate(
        "tree",
        tuple(generator.uniform(0.2, 0.97) for _ in range(depth)),
        auxiliary_rows=generator.choice([0, 7]),
        nodes=tuple(generator.uniform(0.1, 6.0) for _ in range(depth)),
        offered=generator.uniform(0.1, 1.0),
    )
    draft = [0.0, *sorted(generator.uniform(0.0, 0.004) for _ in range(depth))]
    costs = StepCosts(RISING, {"tree": draft})

    def rate(length: int) -> float:
        more = sum(math.prod(drafting.rates[:level]) for level in range(1, length + 1))
        rows = drafting.offered * (sum(drafting.nodes[:length]) + drafting.auxiliary_rows) if length else 0.0
        return (1.0 + drafting.offered * more) / (0.0108 + 0.0008 * rows + draft[length])

    (length,) = choose_draft_lengths([drafting], costs)
    assert rate(length) == pytest.approx(max(rate(candidate) for candidate in range(depth + 1)))


def test_a_tree_that_turns_out_thin_is_drafted_deeper() -> None:
    costs = StepCosts(RISING, {})
    whole = DraftCandidate("eagle2", (0.7,) * 8, width=4)
    thin = replace(whole, nodes=(2.0, 1.5, 1.2, 1.1, 1.0, 1.0, 1.0, 1.0))
    assert choose_draft_lengths([thin], costs) > choose_draft_lengths([whole], costs)


def test_a_drafter_whose_trees_end_early_is_not_asked_for_depths_that_never_come() -> None:
    controller = DraftLengthController(128, dict(enumerate(RISING[1:100], start=1)))
    controller.add(TREE)
    for depth in range(1, 9):
        controller.record_draft("eagle2", depth, 0.001 * depth)
    for _ in range(400):
        (length,) = controller.plan([PlanEntry(0, 8)])
        reached = min(2, length)
        controller.observe(0, length, reached, [2] * reached)
    (length,) = controller.plan([PlanEntry(0, 8)])
    assert length == 2, "two levels are always right, and there is never a third"


def test_what_one_width_showed_says_nothing_of_another() -> None:
    controller = DraftLengthController(128, dict(enumerate(RISING[1:100], start=1)))
    controller.add(TREE)
    for _ in range(400):
        controller.observe(0, 4, 0, [4, 4, 4, 4])
    controller.add(replace(TREE, key=1))
    controller.add(replace(TREE, key=2, width=1))
    same, other = controller.plan([PlanEntry(1, 8), PlanEntry(2, 8)])
    assert same == 0
    assert other > 0


def test_drafts_that_are_mostly_missing_load_the_step_with_what_is_there() -> None:
    full = [0.010] * 40 + [0.010 + 0.004 * rows for rows in range(1, 200)]
    sure = DraftCandidate("ngram", (0.9,) * 8)
    costs = StepCosts(full, {}, other_rows=8)
    always = choose_draft_lengths([sure] * 12, costs)
    seldom = choose_draft_lengths([replace(sure, offered=0.1)] * 12, costs)
    assert sum(always) <= 20, "behind 40 rows nothing is free"
    assert min(seldom) >= 6, "twelve drafts in ten have few rows"


def test_a_draft_that_never_comes_costs_its_drafters_time() -> None:
    costs = StepCosts(RISING, {"rest": [0.0] + [0.001] * 8})
    sure = DraftCandidate("rest", (0.9,) * 8)
    assert choose_draft_lengths([sure], costs)[0] > 0
    assert choose_draft_lengths([replace(sure, offered=0.01)], costs) == [0]


def test_rows_expected_of_a_fixed_draft_are_those_that_it_had() -> None:
    controller = DraftLengthController(128)
    controller.add(replace(TREE, fixed=4))
    assert controller.expected(0, 4)[1] == 17.0
    for _ in range(2000):
        controller.observe(0, 4, 1, [3, 1])
    tokens, rows = controller.expected(0, 4)
    assert tokens == pytest.approx(2.0, abs=0.01)
    assert rows == pytest.approx(5.0, abs=0.05)
    assert controller.expected(0, 0) == controller.expected(7, 3) == (1.0, 1.0), "who drafts nothing"
