"""The planned tree is the best there is, and what it is planned from is learnt and read as it says."""

import json
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import InvalidArgument
from decode.control.rank_acceptance import RankAcceptance, rank_trials
from decode.control.tree_measurements import read_measurements
from decode.control.tree_plan import TreeCosts, TreePlan, expected_tokens_of, usual_shape
from decode.control.tree_shape import TreeShape

Tree = tuple[Any, ...]
"""A node's subtrees, by rank."""

MOST = 6
RATES = st.lists(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=4), min_size=1, max_size=3)


@cache
def forests(nodes: int, depth: int) -> tuple[Tree, ...]:
    """Every ordered forest of exactly `nodes` nodes in at most `depth` levels."""
    if nodes == 0:
        return ((),)
    if depth == 0:
        return ()
    return tuple(
        (first, *others)
        for size in range(1, nodes + 1)
        for first in forests(size - 1, depth - 1)
        for others in forests(nodes - size, depth)
    )


def tokens_of(tree: Tree, rates: Sequence[Sequence[float]], level: int = 0) -> float:
    """Expected tokens, straight from the definition."""
    row = rates[min(level, len(rates) - 1)]
    total, earlier_failed = 1.0, 1.0
    for rank, subtree in enumerate(tree):
        rate = row[rank] if rank < len(row) else 0.0
        total += earlier_failed * rate * tokens_of(subtree, rates, level + 1)
        earlier_failed *= 1.0 - rate
    return total


def all_trees(nodes: int, depth: int) -> Iterator[Tree]:
    for size in range(nodes + 1):
        yield from forests(size, depth)


@settings(deadline=None, max_examples=40)
@given(RATES)
def test_no_tree_within_a_budget_emits_more_than_the_planned_one(rates: list[list[float]]) -> None:
    plan = TreePlan(rates, MOST, 4)
    for nodes in range(MOST + 1):
        for depth in range(5):
            best = max(tokens_of(tree, rates) for tree in all_trees(nodes, depth))
            shape = plan.shape(nodes, depth)
            assert shape.num_nodes <= nodes
            assert shape.depth <= depth
            assert max(shape.counts) <= max(len(row) for row in rates)
            assert plan.expected_tokens(nodes, depth) == pytest.approx(best)
            assert expected_tokens_of(shape, rates) == pytest.approx(best)


@settings(deadline=None, max_examples=40)
@given(
    RATES,
    st.lists(st.floats(0.001, 1.0), min_size=MOST + 1, max_size=MOST + 1),
    st.lists(st.floats(0.0, 1.0), min_size=3, max_size=3),
)
def test_the_chosen_budget_emits_most_tokens_a_second(
    rates: list[list[float]], step_seconds: list[float], draft_seconds: list[float]
) -> None:
    costs = TreeCosts(lambda rows: step_seconds[rows - 1], lambda depth: ([0.0, *draft_seconds])[depth])
    planned = TreePlan(rates, MOST, 3).best(MOST, 3, costs)
    best = max(
        max(tokens_of(tree, rates) for tree in all_trees(nodes, depth))
        / (step_seconds[nodes] + ([0.0, *draft_seconds])[depth])
        for nodes in range(MOST + 1)
        for depth in range(4)
        if bool(nodes) == bool(depth)
    )
    assert planned.tokens_per_second == pytest.approx(best)


def test_free_rows_are_filled_and_dear_rows_are_not() -> None:
    plan = TreePlan([[0.7, 0.3]], 16, 4)
    free = TreeCosts(lambda rows: 0.02, lambda depth: 0.0)
    dear = TreeCosts(lambda rows: 0.02 * rows, lambda depth: 0.0)
    assert plan.best(16, 4, free).shape.num_nodes == 16
    assert plan.best(16, 4, dear).shape == TreeShape((0,))
    assert plan.best(16, 4, dear, fewest=1).shape == TreeShape((1, 0))


def test_a_larger_batch_gets_smaller_trees() -> None:
    plan = TreePlan([[0.7, 0.3]], 16, 4)
    sizes = [
        plan.best(
            16, 4, TreeCosts(lambda rows: 0.02 + 0.0005 * rows, lambda depth: 0.0, batch)
        ).shape.num_nodes
        for batch in (1, 4, 16, 64)
    ]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[-1]


@pytest.mark.parametrize("rates", [[], [[]], [[0.5, 1.5]], [[-0.1]], [[0.5], [float("nan")]]])
def test_rates_that_are_no_probabilities_are_refused(rates: list[list[float]]) -> None:
    with pytest.raises(ValueError):
        TreePlan(rates, 4, 2)


@pytest.mark.parametrize("counts", [(1,), (0, 0), (2, 0), (1, -1), ()])
def test_counts_that_are_no_tree_are_refused(counts: tuple[int, ...]) -> None:
    with pytest.raises(ValueError):
        TreeShape(counts)


def test_a_shape_knows_its_parents_and_its_depth() -> None:
    shape = TreeShape((2, 1, 2, 0, 0, 0))
    assert shape.parents() == (0, 0, 1, 2, 2)
    assert shape.first_children() == (1, 3, 4, 6, 6, 6)
    assert (shape.num_nodes, shape.num_parents, shape.depth) == (5, 3, 2)
    assert TreeShape.chain(3) == TreeShape((1, 1, 1, 0))


def test_the_usual_shape_keeps_to_its_budget() -> None:
    for width in (1, 2, 8):
        shape = usual_shape(12, 3, width)
        assert shape.depth <= 3
        assert max(shape.counts) <= width
        assert shape.num_nodes == min(12, 3 if width == 1 else 12)


def test_trials_are_counted_by_rank_along_the_walk() -> None:
    # root: rows 1, 2, 3; row 2: rows 4, 5; row 5: row 6
    parents = (0, 0, 0, 2, 2, 5)
    assert rank_trials(parents, (2, 5)) == [(3, 1), (2, 1), (1, None)]
    assert rank_trials(parents, ()) == [(3, None)]
    assert rank_trials(parents, (3,)) == [(3, 2)]
    assert rank_trials((), ()) == []


def test_rank_rates_are_those_of_the_trials_that_took_place() -> None:
    acceptance = RankAcceptance(3, decay=0.999)
    for number in range(6000):
        kind = number % 4
        acceptance.observe((0, 0, 0), ((1,), (1,), (2,), ())[kind])
    first, second, third = acceptance.rates
    assert first == pytest.approx(1 / 2, abs=0.02)
    assert second == pytest.approx(1 / 2, abs=0.02)
    assert third < 0.02, "it was tried once in four steps, and never right"


def test_old_trials_fade() -> None:
    acceptance = RankAcceptance(1, decay=0.9)
    for accepted in ((1,), ()):
        for _ in range(100):
            acceptance.observe((0,), accepted)
    assert acceptance.rates[0] < 0.01


def write(path: Path, values: object) -> Path:
    path.write_text(json.dumps(values))
    return path


def test_measurements_are_read_and_interpolated(tmp_path: Path) -> None:
    path = write(
        tmp_path / "m.json",
        {
            "rank_rates": [0.7, 0.2],
            "step_seconds": {"1": 0.01, "9": 0.05},
            "draft_level_seconds": 0.004,
        },
    )
    measured = read_measurements(path, "measurements")
    assert measured.rank_rates == ((0.7, 0.2),)
    costs = measured.costs(9)
    assert [costs.step_seconds(rows) for rows in (1, 5, 9)] == pytest.approx([0.01, 0.03, 0.05])
    assert costs.draft_seconds(3) == pytest.approx(0.012)
    assert measured.costs(5).step_seconds(5) == pytest.approx(0.03), "rows beyond those asked for count too"
    by_depth = write(tmp_path / "d.json", {"rank_rates": [[0.7, 0.2], [0.5]]})
    assert read_measurements(by_depth, "measurements").rank_rates == ((0.7, 0.2), (0.5,))


@pytest.mark.parametrize(
    ("values", "place"),
    [
        ({}, "rank_rates"),
        ({"rank_rates": []}, "rank_rates"),
        ({"rank_rates": [0.5, 1.2]}, "rank_rates.0.1"),
        ({"rank_rates": [0.5], "step_seconds": {"0": 1.0}}, "step_seconds"),
        ({"rank_rates": [0.5], "step_seconds": {"1": -1.0}}, "step_seconds"),
        ({"rank_rates": [0.5], "rate": 1}, "rate"),
    ],
)
def test_bad_measurements_are_refused_naming_what_is_wrong(
    tmp_path: Path, values: dict[str, object], place: str
) -> None:
    with pytest.raises(InvalidArgument, match=place):
        read_measurements(write(tmp_path / "m.json", values), "measurements")


def test_a_missing_file_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"none\.json"):
        read_measurements(tmp_path / "none.json", "measurements")
