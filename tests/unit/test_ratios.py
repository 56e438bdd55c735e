"""The lower bound of a median is one that is broken as rarely as it says."""

import random

import pytest

from tests.bench.ratios import lower_bound_of_median, median_ratio, paired_median, ratios_by_prompt, rotated


def test_four_values_are_too_few_for_a_bound() -> None:
    assert lower_bound_of_median([1.0, 2.0, 3.0, 4.0]) is None
    assert lower_bound_of_median([1.0, 2.0, 3.0, 4.0, 5.0]) == 1.0


def test_bound_of_thirty_values_is_the_tabulated_order_statistic() -> None:
    values = [float(number) for number in range(1, 31)]
    random.Random(0).shuffle(values)
    assert lower_bound_of_median(values) == 11.0


def test_bound_is_above_the_true_median_in_at_most_five_percent_of_samples() -> None:
    source = random.Random(1)
    trials = 4000
    broken = 0
    for _ in range(trials):
        bound = lower_bound_of_median([source.lognormvariate(0.0, 0.5) for _ in range(25)])
        assert bound is not None
        broken += bound > 1.0
    assert broken / trials <= 0.06


def test_median_of_no_ratios_is_refused() -> None:
    with pytest.raises(ValueError):
        median_ratio([])


def test_each_arm_is_first_in_turn() -> None:
    orders = [rotated(("a", "b", "c"), turn) for turn in range(4)]
    assert orders == [("a", "b", "c"), ("b", "c", "a"), ("c", "a", "b"), ("a", "b", "c")]


def test_paired_median_is_of_the_ratios_round_by_round() -> None:
    assert paired_median([10.0, 30.0, 8.0], [5.0, 10.0, 8.0]) == 2.0


def test_ratios_of_unequal_numbers_of_rounds_are_refused() -> None:
    with pytest.raises(ValueError):
        paired_median([1.0, 2.0], [1.0])


def test_a_prompt_counts_once_by_the_median_of_the_rounds_that_both_arms_have() -> None:
    these = {("a", 0): 2.0, ("a", 1): 8.0, ("a", 2): 3.0, ("b", 0): 5.0, ("c", 0): 1.0}
    those = {("a", 0): 1.0, ("a", 1): 1.0, ("a", 2): 1.0, ("b", 0): 10.0, ("b", 1): 7.0}
    assert ratios_by_prompt(these, those) == [3.0, 0.5]
