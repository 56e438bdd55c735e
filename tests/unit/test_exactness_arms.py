"""The exactness suite fails an arm for every reason that the issue of exactness names, and for no other."""

from dataclasses import replace

import pytest

from tests.bench.arms import Answer, Arm, ArmResult, differences

NGRAM = Arm("ngram chain", "ngram", 0.0)
GOOD = ArmResult(NGRAM, (Answer("p", (1, 2, 3), offered=5, accepted=2),), blocks=4, seconds=1.0)


def test_an_arm_that_did_all_it_should_passes() -> None:
    assert GOOD.failures() == []


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (replace(GOOD, blocks=0), "no block"),
        (replace(GOOD, differing_tokens=1, differing_prompts=("p",)), "1 tokens differ: p"),
        (replace(GOOD, answers=(Answer("p", (1,)),)), "nothing was offered"),
        (replace(GOOD, answers=(Answer("p", (1,), offered=3, accepted=0),)), "nothing was accepted"),
        (replace(GOOD, answers=(Answer("p", (1,), offered=3, accepted=3),)), "nothing was rejected"),
        (replace(GOOD, answers=(*GOOD.answers, Answer("q", (), error="UnavailableError: x"))), "q: Unavail"),
    ],
)
def test_each_reason_fails_the_arm(result: ArmResult, reason: str) -> None:
    assert any(failure.startswith(reason) for failure in result.failures())


def test_a_warm_arm_needs_no_hand_off_and_a_scripted_one_no_rejection() -> None:
    assert replace(GOOD, arm=replace(NGRAM, cold=False), blocks=0).failures() == []
    all_right = replace(GOOD, answers=(Answer("p", (1,), offered=3, accepted=3),))
    assert replace(all_right, arm=replace(NGRAM, scripted=True)).failures() == []


def test_missing_surplus_and_other_tokens_all_count() -> None:
    reference = {"a": (1, 2, 3), "b": (1, 2, 3), "c": (1, 2, 3), "d": (1, 2, 3)}
    answers = [
        Answer("a", (1, 2, 3)),
        Answer("b", (1, 9, 3)),
        Answer("c", (1,)),
        Answer("d", (1, 2, 3, 4)),
        Answer("e", (), error="InternalError: failed"),
    ]
    assert differences(reference, answers) == (4, ("b", "c", "d"))
