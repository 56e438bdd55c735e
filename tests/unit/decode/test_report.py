"""Acceptance is counted where the answer was cut (CASES B53, checked by hand)."""

from decode.report import Tally


def test_a_chain_counts_offered_and_accepted_by_depth() -> None:
    tally = Tally("ngram", "chat", 4)
    tally.add_step((1, 2, 3, 4), num_accepted=2, num_emitted=3, finished=False)
    tally.add_step((), num_accepted=0, num_emitted=1, finished=False)
    tally.add_step((1, 2), num_accepted=2, num_emitted=3, finished=False)
    report = tally.snapshot()
    assert (report.steps, report.step_tokens, report.proposed_nodes, report.accepted_tokens) == (3, 7, 6, 4)
    assert report.position_offered == (2, 2, 1, 1)
    assert report.position_accepted == (2, 2, 0, 0)
    assert report.acceptance_rate == 4 / 6
    assert report.acceptance_length == 7 / 3
    assert report.draft_length_mean == 6 / 3


def test_a_tree_counts_once_a_depth() -> None:
    tally = Tally("ngram", "chat", None)
    tally.add_step((1, 1, 2, 2, 3), num_accepted=1, num_emitted=2, finished=False)
    report = tally.snapshot()
    assert (report.position_offered, report.position_accepted) == ((1, 1, 1), (1, 0, 0))
    assert (report.proposed_nodes, report.draft_length_sum) == (5, 3)


def test_counts_are_cut_where_the_answer_ended_inside_the_burst() -> None:
    tally = Tally("ngram", "chat", None)
    tally.add_step((1, 2, 3, 4, 5, 6), num_accepted=6, num_emitted=3, finished=True)
    report = tally.snapshot()
    assert (report.accepted_tokens, report.step_tokens) == (3, 3)
    assert (report.position_offered, report.position_accepted) == ((1, 1, 1), (1, 1, 1))
    assert report.proposed_nodes == 6


def test_rates_of_nothing_are_null() -> None:
    report = Tally("none", "chat", None).snapshot()
    assert report.acceptance_rate is None
    assert report.acceptance_length is None
    assert report.draft_length_mean is None


def test_the_first_fallback_reason_stays() -> None:
    tally = Tally("ngram", "chat", None)
    assert tally.fall_back("drafter_error")
    assert not tally.fall_back("position_limit")
    assert tally.snapshot().fallback_reason == "drafter_error"
