"""What the controller is told of drafts of any shape."""

from types import SimpleNamespace
from typing import cast

import pytest

from decode.choice import Choice
from decode.drafters.protocol import DrafterNeeds
from decode.pace import Pace

NEEDS = DrafterNeeds(max_draft_length=8, default_draft_length=4, max_draft_width=4, auxiliary_rows=5)


def joined(pace: Pace, fixed: int | None = None) -> Choice:
    """A choice as far as its pace looks at it."""
    choice = cast(
        Choice,
        SimpleNamespace(
            key=1,
            drafter=SimpleNamespace(name="eagle2", needs=NEEDS),
            request=SimpleNamespace(job=SimpleNamespace(request_class="chat")),
            draft_request=SimpleNamespace(draft_width=4),
            draft_length_start=None,
            draft_length_fixed=fixed,
            thinking=None,
            drafting=True,
        ),
    )
    pace.join(choice)
    return choice


def expected_rows(pace: Pace, length: int) -> float:
    return pace._controller.expected(1, length)[1] - 1.0


def test_nodes_are_counted_by_depth_with_the_depths_that_were_not_reached() -> None:
    pace = Pace(128)
    choice = joined(pace)
    assert expected_rows(pace, 4) == 4 * 4 + 5
    for _ in range(3000):
        pace.learn(choice, 4, (1, 1, 1, 2), 2)
    assert expected_rows(pace, 2) == pytest.approx(3 + 1 + 5, abs=0.01)
    assert expected_rows(pace, 4) == pytest.approx(3 + 1 + 5, abs=0.02)
    rates = pace._controller._choices[1].acceptance.rates
    assert rates[:3] == pytest.approx((0.999, 0.999, 0.001), abs=0.001)


def test_a_draft_that_is_missing_says_so_and_nothing_of_acceptance() -> None:
    pace = Pace(128)
    choice = joined(pace)
    before = pace._controller._choices[1].acceptance.rates
    for _ in range(400):
        pace.learn(choice, 4, (), 0)
    assert expected_rows(pace, 4) < 0.1
    assert pace._controller._choices[1].acceptance.rates == before
    pace.learn(choice, 0, (), 0)
    for _ in range(400):
        pace.learn(choice, 4, (), 0, num_auxiliary=5)
    assert expected_rows(pace, 1) == pytest.approx(5.0, abs=0.6), "a window alone was paid for"
    assert pace._controller._choices[1].acceptance.rates[0] < 0.01


def test_fixed_drafts_load_the_step_with_the_rows_that_they_have() -> None:
    pace = Pace(128)
    choice = joined(pace, fixed=4)
    for _ in range(3000):
        pace.learn(choice, 4, (1,), 1)
    assert pace.lengths([choice], [(4, 21)], 0) == [(4, 21)], "what it may take stays"
    tokens, rows = pace._of_others([choice], [(4, 21)], [])
    assert rows == pytest.approx(1 + 1 + 5, abs=0.02)
    assert tokens == pytest.approx(2.0, abs=0.02)
    assert pace._of_others([choice], [(4, 21)], [0]) == (0.0, 0.0)
