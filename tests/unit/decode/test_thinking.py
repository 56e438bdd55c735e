"""K while a model thinks aloud."""

from itertools import pairwise

import pytest

from decode.control.controller import ControlledChoice, DraftLengthController, PlanEntry
from decode.thinking import ThinkingSpan

OPEN, CLOSE = (7,), (8, 9)


def span() -> ThinkingSpan:
    return ThinkingSpan(OPEN, CLOSE, thinking_length=12, outside_length=4)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3], None),
        ([1, 7, 3], 12),
        ([1, 7, 3, 8, 9], None),
        ([8, 9, 1, 7], 12),
        ([7, 8], 12),
        ([8, 9], None),
        ([], None),
    ],
)
def test_the_last_marker_of_a_prompt_counts(tokens: list[int], expected: int | None) -> None:
    assert span().turn(tokens) == expected


@pytest.mark.parametrize("burst", [1, 2, 3, 5])
def test_markers_are_found_however_the_answer_comes(burst: int) -> None:
    tokens = [1, 2, 7, 3, 8, 3, 8, 9, 5, 7, 7, 4, 8, 9, 9]
    seen = span()
    lengths: list[int] = []
    for end in range(1, len(tokens) + burst, burst):
        length = seen.turn(tokens[:end])
        if length is not None:
            lengths.append(length)
        assert seen.turn(tokens[:end]) is None, "nothing new, nothing to do"
    assert all(first != second for first, second in pairwise(lengths))
    assert lengths[-1] == 4
    assert lengths[0] == 12


def controller(fixed: int | None = None) -> DraftLengthController:
    made = DraftLengthController(64)
    made.add(ControlledChoice(1, "ngram", "reasoning", 16, 4, start_length=4, fixed=fixed))
    return made


def test_a_restart_holds_its_length_until_something_is_measured() -> None:
    made = controller()
    assert made.plan([PlanEntry(1, 16)]) == [4]
    made.restart(1, 12)
    assert made.plan([PlanEntry(1, 16)]) == [12]
    assert made.plan([PlanEntry(1, 5)]) == [5]
    made.restart(1, 99)
    assert made.plan([PlanEntry(1, 64)]) == [16]
    made.restart(2, 3)
    made.remove(1)
    made.check()


def test_a_fixed_length_stays() -> None:
    made = controller(fixed=3)
    made.restart(1, 12)
    assert made.plan([PlanEntry(1, 16)]) == [3]
