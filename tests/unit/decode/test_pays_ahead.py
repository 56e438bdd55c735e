"""Whether to draft ahead of a pipelined target: by what was measured of acceptance, steps and drafts."""

from random import Random

import pytest

from decode.control.controller import ControlledChoice, DraftLengthController

STEP_S = 0.030
KEY = 1


def controller(rate: float, draft_s_by_depth: float, asked: int = 1) -> DraftLengthController:
    """One choice whose drafts of `asked` hold at every depth with chance `rate`, and cost so much a token."""
    made = DraftLengthController(64)
    made.add(ControlledChoice(KEY, "eagle3", "chat", max_length=16, default_length=4))
    random = Random(0)
    for _ in range(2000):
        made.observe(KEY, asked, next(n for n in range(asked + 1) if n == asked or random.random() >= rate))
    for rows in range(1, 12):
        made.record_step(rows, STEP_S)
    for depth in range(1, 12):
        made.record_draft("eagle3", depth, depth * draft_s_by_depth)
    return made


@pytest.mark.parametrize(
    ("rate", "draft_s_by_depth", "pays"),
    [
        (0.5, 0.0001, True),  # 0.25 of 15 ms against 0.3 ms
        (0.05, 0.0001, False),
        (0.5, 0.003, False),  # 0.25 of 18 ms against 9 ms
        (0.9, 0.003, True),
        (0.9, 0.010, False),
    ],
)
def test_it_pays_where_half_a_step_times_the_chance_is_more_than_the_draft(
    rate: float, draft_s_by_depth: float, pays: bool
) -> None:
    assert controller(rate, draft_s_by_depth).pays_ahead(KEY, known=2, length=1, deeper=3) is pays


def test_a_longer_burst_is_held_more_seldom() -> None:
    assert controller(0.7, 0.001).pays_ahead(KEY, known=2, length=1, deeper=3)
    assert not controller(0.7, 0.001, asked=5).pays_ahead(KEY, known=6, length=5, deeper=11)


def test_drafts_that_were_never_timed_are_tried() -> None:
    made = DraftLengthController(64)
    made.add(ControlledChoice(KEY, "ngram", "chat", max_length=16, default_length=4))
    assert made.pays_ahead(KEY, known=5, length=4, deeper=9)
