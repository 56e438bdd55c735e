"""Who is admitted and whose rows are computed: nobody starves."""

from hypothesis import given
from hypothesis import strategies as st

from prefill.scheduler import (
    MAX_OVERTAKEN,
    RunningView,
    WaitingView,
    plan_admission,
    plan_chunks,
)


def rows(running: list[RunningView], num_rows: int) -> dict[int, int]:
    return {plan.key: plan.num_rows for plan in plan_chunks(running, num_rows)}


def test_a_prompt_alone_has_the_whole_step() -> None:
    assert rows([RunningView(0, 1000)], 256) == {0: 256}
    assert rows([RunningView(0, 10)], 256) == {0: 10}
    assert plan_chunks([], 256) == ()


def test_a_short_tail_costs_no_step_of_its_own() -> None:
    assert rows([RunningView(0, 320)], 256) == {0: 320}
    assert rows([RunningView(0, 321)], 256) == {0: 256}
    assert rows([RunningView(0, 200), RunningView(1, 100)], 256) == {0: 200, 1: 100}


def test_a_short_prompt_behind_a_long_one_is_done_in_its_first_step() -> None:
    assert rows([RunningView(0, 10_000), RunningView(1, 100)], 256) == {0: 156, 1: 100}


def test_the_oldest_has_half_of_the_step_for_sure() -> None:
    running = [RunningView(0, 10_000), *(RunningView(key, 1000) for key in range(1, 9))]
    assert rows(running, 256) == {0: 128, 1: 128}


def test_the_shortest_of_the_younger_ones_goes_first() -> None:
    running = [RunningView(0, 500), RunningView(1, 400), RunningView(2, 30), RunningView(3, 50)]
    assert rows(running, 128) == {0: 64, 2: 30, 3: 34}


@given(st.lists(st.integers(1, 400), max_size=12), st.integers(1, 300))
def test_a_step_is_full_or_all_is_in_it_and_nobody_gets_more_than_remains(
    remaining: list[int], num_rows: int
) -> None:
    planned = rows([RunningView(key, count) for key, count in enumerate(remaining)], num_rows)
    total = sum(remaining)
    assert sum(planned.values()) == (total if total <= num_rows + num_rows // 4 else num_rows)
    assert all(0 < count <= remaining[key] for key, count in planned.items())


@given(st.integers(1, 2000), st.lists(st.integers(1, 100), min_size=1, max_size=40))
def test_the_oldest_ends_in_bounded_time_under_a_flood_of_short_ones(length: int, flood: list[int]) -> None:
    remaining, steps = length, 0
    while remaining:
        running = [
            RunningView(0, remaining),
            *(RunningView(key + 1, count) for key, count in enumerate(flood)),
        ]
        remaining -= rows(running, 64)[0]
        steps += 1
    assert steps <= -(-length // 32)


def test_prompts_are_admitted_in_order_while_they_fit() -> None:
    waiting = [WaitingView(0, 3), WaitingView(1, 4), WaitingView(2, 2)]
    assert plan_admission(waiting, 7).admitted == (0, 1)
    assert plan_admission(waiting, 9).admitted == (0, 1, 2)
    assert plan_admission([], 9).admitted == ()


def test_a_small_prompt_passes_one_that_does_not_fit_and_that_is_counted() -> None:
    admission = plan_admission([WaitingView(0, 10), WaitingView(1, 2)], 5)
    assert (admission.admitted, admission.overtaken) == ((1,), (0,))


def test_nobody_is_counted_as_overtaken_where_nobody_passed() -> None:
    assert plan_admission([WaitingView(0, 10), WaitingView(1, 12)], 5).overtaken == ()


def test_a_prompt_overtaken_too_often_is_waited_for() -> None:
    admission = plan_admission([WaitingView(0, 10, MAX_OVERTAKEN), WaitingView(1, 2)], 5)
    assert admission.admitted == ()


@given(st.integers(2, 20))
def test_a_large_prompt_gets_in_under_a_steady_flood_of_small_ones(pool: int) -> None:
    overtaken, held, admitted_large = 0, [1] * pool, False
    for _ in range(10 * MAX_OVERTAKEN + 2 * pool):
        if held:
            held.pop()
        waiting = [WaitingView(0, pool, overtaken), WaitingView(1, 1)]
        admission = plan_admission(waiting, pool - len(held))
        if 0 in admission.admitted:
            admitted_large = True
            break
        overtaken += len(admission.overtaken)
        held += [1] * (1 in admission.admitted)
    assert admitted_large
