"""The bench of drafts' distance tells which answers are wrong, and reports what was not measured as missing."""

from outrider.results import Speculation
from tests.bench.coupling import Coupling
from tests.bench.draft_distance import INVARIANT, PLAIN, REJECTION, Arm, report_of, wrong_answers
from tests.bench.timed import Timed

COUPLING = Coupling(total_variation=0.5, best=0.5, shared_noise=0.4, bound=1 / 3)


def answer(token_ids: tuple[int, ...], rate: float) -> Timed:
    """Of four steps, three of which offered two tokens."""
    report = Speculation("eagle3", "chat", 2, 1.5, 4, 6, 3, 0.5, 1.75, (3, 2), (2, 1), None)
    return Timed(token_ids, 1, 0.1, 0.1 + (len(token_ids) - 1) / rate, report)


def arms_of(**token_ids: tuple[int, ...]) -> dict[str, Arm]:
    arms = {name: Arm() for name in (PLAIN, INVARIANT, REJECTION)}
    for speed, (name, ids) in enumerate(token_ids.items(), 1):
        arms[name].take(("a", 0), answer(ids, 10.0 * speed))
    return arms


def test_other_tokens_are_wrong_in_invariant_mode_and_in_this_process_but_not_under_rejection() -> None:
    plain, other = tuple(range(20)), tuple(range(19))
    right = arms_of(none=plain, invariant=plain, rejection=other)
    assert wrong_answers({("a", 0): plain}, right) == {INVARIANT: 0, "in_process": 0}
    assert wrong_answers({("a", 0): other}, right) == {INVARIANT: 0, "in_process": 1}
    wrong = arms_of(none=plain, invariant=other, rejection=plain)
    assert wrong_answers({("a", 0): plain}, wrong) == {INVARIANT: 1, "in_process": 0}


def test_acceptance_is_that_of_position_one_and_speed_is_a_ratio_of_paired_answers() -> None:
    plain = tuple(range(20))
    report = report_of(
        [COUPLING], {("a", 0): plain}, arms_of(none=plain, invariant=plain, rejection=plain[::-1])
    )
    assert report["served"][INVARIANT]["position_1"] == round(2 / 3, 4)  # type: ignore[index]
    assert report["speed"] == {
        "invariant / none": {"median": 2.0, "lower_bound": None, "prompts": 1},
        "rejection / none": {"median": 3.0, "lower_bound": None, "prompts": 1},
        "invariant / rejection": {"median": 0.667, "lower_bound": None, "prompts": 1},
    }


def test_answers_too_short_to_be_timed_have_no_speed_but_an_acceptance() -> None:
    short = (1, 2, 3)
    report = report_of([COUPLING], {("a", 0): short}, arms_of(none=short, invariant=short, rejection=short))
    assert report["speed"]["invariant / none"] == {"median": None, "lower_bound": None, "prompts": 0}  # type: ignore[index]
    assert report["served"][REJECTION]["offered"] == 3  # type: ignore[index]
