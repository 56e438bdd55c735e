"""Shares of a step, admission and victims, as tables (CASES B45)."""

import pytest

from decode.scheduler import (
    MAX_OVERTAKEN,
    ChoiceView,
    PrefillView,
    StepPlan,
    VictimView,
    WaitingView,
    admit,
    choose_victim,
    plan_step,
)


def rows(plan: StepPlan) -> int:
    nodes = sum(1 + choice.max_nodes for choice in plan.choices)
    return nodes + sum(prefill.rows for prefill in plan.prefills) + plan.drafter_rows


def test_every_choice_gets_its_draft_where_there_is_room() -> None:
    plan = plan_step([ChoiceView(1, 4, 4), ChoiceView(2, 0, 0), ChoiceView(3, 3, 9)], [], 64, False)
    assert [(c.key, c.draft_length, c.max_nodes) for c in plan.choices] == [(1, 4, 4), (2, 0, 0), (3, 3, 9)]


def test_auxiliary_rows_are_granted_beside_the_nodes_and_none_without_a_draft() -> None:
    plan = plan_step([ChoiceView(1, 2, 2 * 3 + 7), ChoiceView(2, 0, 13)], [PrefillView(3, 500)], 32, False)
    assert [(c.draft_length, c.max_nodes) for c in plan.choices] == [(2, 13), (0, 0)]
    assert plan.prefills[0].rows == 32 - 2 - 13
    short = plan_step([ChoiceView(1, 2, 13), ChoiceView(2, 4, 4)], [], 10, False)
    assert [(c.draft_length, c.max_nodes) for c in short.choices] == [(2, 4), (4, 4)]


def test_drafts_share_what_roots_leave() -> None:
    plan = plan_step([ChoiceView(key, 8, 8) for key in range(4)], [], 16, False)
    assert [choice.max_nodes for choice in plan.choices] == [3, 3, 3, 3]
    assert [choice.draft_length for choice in plan.choices] == [3, 3, 3, 3]


def test_a_waiting_prompt_always_gets_a_share_and_takes_what_is_left() -> None:
    crowded = plan_step([ChoiceView(key, 8, 8) for key in range(8)], [PrefillView(99, 500)], 32, False)
    assert crowded.prefills[0].rows >= 8
    alone = plan_step([], [PrefillView(99, 500)], 32, False)
    assert alone.prefills[0].rows == 32


def test_several_prompts_are_served_in_order() -> None:
    plan = plan_step([], [PrefillView(1, 20), PrefillView(2, 20)], 32, False)
    assert [(view.key, view.rows) for view in plan.prefills] == [(1, 20), (2, 12)]


def test_a_drafters_own_prompt_work_shares_the_budget() -> None:
    plan = plan_step([ChoiceView(1, 8, 8)], [PrefillView(2, 500)], 32, True)
    assert plan.drafter_rows > 0
    assert plan.prefills[0].rows > 0
    assert rows(plan) <= 32


@pytest.mark.parametrize("num_choices", [1, 3, 8, 31, 32, 40])
@pytest.mark.parametrize("num_prefills", [0, 1, 3])
@pytest.mark.parametrize("drafter_pending", [False, True])
def test_the_budget_is_never_exceeded(num_choices: int, num_prefills: int, drafter_pending: bool) -> None:
    choices = [ChoiceView(key, key % 9, 3 * (key % 9) + 7 * (key % 9 > 0)) for key in range(num_choices)]
    prefills = [PrefillView(100 + key, 17 * (key + 1)) for key in range(num_prefills)]
    assert rows(plan_step(choices, prefills, 32, drafter_pending)) <= 32


def test_more_choices_than_rows_step_in_turn() -> None:
    plan = plan_step([ChoiceView(key, 0, 0) for key in range(40)], [], 32, False)
    assert [choice.key for choice in plan.choices] == list(range(32))


def test_a_search_takes_a_row_for_each_hypothesis_and_waits_for_its_turn_whole() -> None:
    wide = ChoiceView(1, 0, 0, num_roots=20)
    plan = plan_step([ChoiceView(0, 8, 8), wide, ChoiceView(2, 8, 8)], [], 32, False)
    assert [(choice.key, choice.max_nodes) for choice in plan.choices] == [(0, 5), (1, 0), (2, 5)]
    plan = plan_step([ChoiceView(0, 4, 4), wide, ChoiceView(2, 4, 4)], [PrefillView(9, 50)], 24, False)
    assert [choice.key for choice in plan.choices] == [0]


def test_a_search_whose_turn_it_is_steps_however_wide_it_is() -> None:
    wide = ChoiceView(1, 0, 0, num_roots=24)
    plan = plan_step([wide, ChoiceView(2, 4, 4)], [PrefillView(9, 50)], 24, False)
    assert [choice.key for choice in plan.choices] == [1]
    assert plan.prefills == ()
    plan = plan_step([wide, ChoiceView(2, 4, 4)], [PrefillView(9, 50)], 40, False)
    assert [choice.key for choice in plan.choices] == [1, 2]
    assert 24 + 1 + plan.choices[1].max_nodes + plan.prefills[0].rows <= 40


def waiting(*sizes: int, overtaken: int = 0) -> list[WaitingView]:
    return [WaitingView(key, blocks, 1, overtaken) for key, blocks in enumerate(sizes)]


def test_requests_join_in_order_while_they_fit() -> None:
    assert admit(waiting(4, 4, 4), 10, 10).admitted == (0, 1)


def test_a_small_request_passes_one_that_does_not_fit_and_is_counted() -> None:
    admission = admit(waiting(20, 4), 10, 10)
    assert (admission.admitted, admission.overtaken) == ((1,), (0,))


def test_one_that_was_passed_often_is_passed_no_more() -> None:
    assert admit(waiting(20, 4, overtaken=MAX_OVERTAKEN), 10, 10).admitted == ()
    assert admit(waiting(20, 4, overtaken=MAX_OVERTAKEN), 20, 10).admitted == (0,)


def test_places_are_kept_for_the_first_in_turn() -> None:
    views = [WaitingView(0, 1, 4, 0), WaitingView(1, 1, 1, 0)]
    assert admit(views, 10, 3).admitted == ()


def test_nobody_counts_as_passed_where_nobody_behind_joined() -> None:
    assert admit(waiting(20, 30), 10, 10).overtaken == ()


def test_the_victim_has_emitted_least_and_joined_last() -> None:
    assert choose_victim([VictimView(1, 5, 1), VictimView(2, 3, 2), VictimView(3, 3, 3)]) == 3
    assert choose_victim([]) is None
