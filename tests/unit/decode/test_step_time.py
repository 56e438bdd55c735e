"""Seconds by count: interpolated, monotone, with outliers clipped and the pace of the machine followed."""

import math

import pytest

from decode.control.step_time import StepTimeTable, monotone


def test_step_times_are_interpolated_monotone_and_go_on_beyond_what_was_seen() -> None:
    table = StepTimeTable(32, {1: 0.010, 5: 0.012, 9: 0.011, 16: 0.020})
    assert table.seconds == sorted(table.seconds)
    assert table.seconds[1] == 0.010
    assert 0.010 < table.seconds[3] < 0.012
    assert table.seconds[32] > table.seconds[16]
    assert len(table.seconds) == 33


def test_monotone_pools_neighbours_by_weight() -> None:
    assert monotone([1.0, 3.0, 2.0, 5.0], [1.0, 1.0, 3.0, 1.0]) == [1.0, 2.25, 2.25, 5.0]


def test_values_that_are_no_durations_are_ignored_and_one_stall_is_clipped() -> None:
    table = StepTimeTable(8, {1: 0.010})
    for seconds in (math.nan, math.inf, -1.0, 0.0):
        table.record(1, seconds)
    table.record(99, 0.010)
    for _ in range(50):
        table.record(1, 0.010)
    table.record(1, 30.0)
    for _ in range(8):
        table.record(1, 0.010)
    assert table.seconds[1] < 0.0115


@pytest.mark.parametrize("slow", [0.3, 3.0])
def test_a_machine_that_slows_down_for_a_while_leaves_no_count_dear(slow: float) -> None:
    table = StepTimeTable(32)
    for _ in range(100):
        table.record(8, 0.028)
        table.record(16, 0.032)
    for _ in range(100):
        table.record(8, slow * 0.028)
        table.record(16, slow * 0.032)
    for _ in range(100):
        table.record(8, 0.028)
    assert table.seconds[8] == pytest.approx(0.028, rel=0.02)
    assert table.seconds[16] == pytest.approx(0.032, rel=0.1), "it was not seen since"


@pytest.mark.parametrize("place", range(6))
def test_a_stall_among_the_first_measurements_makes_no_other_count_cheap(place: int) -> None:
    table = StepTimeTable(32)
    for _ in range(100):
        table.record(16, 0.032)
    for number in range(40):
        table.record(8, 0.28 if number == place else 0.028)
    assert table.seconds[16] == pytest.approx(0.032, rel=0.1)
    assert table.seconds[8] == pytest.approx(0.028, rel=0.1)


def test_one_stall_is_not_the_pace_of_the_machine() -> None:
    table = StepTimeTable(32)
    for _ in range(100):
        table.record(8, 0.028)
        table.record(16, 0.032)
    table.record(8, 5.0)
    for _ in range(15):
        table.record(8, 0.028)
    assert table.seconds[16] == pytest.approx(0.032, rel=0.1)
