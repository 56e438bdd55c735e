"""What `auto` takes, by what was measured: tried in order, then the fastest, or plain where none is surely faster."""

from collections import Counter
from collections.abc import Callable, Mapping

import pytest

from decode.control.drafter_choice import DOUBTED_EVERY, EXPLORED_EVERY, PLAIN, TRIALS, DrafterChoice

THREE = ("eagle3", "mtp", "ngram")


def served(
    choice: DrafterChoice,
    count: int,
    gains: Mapping[str, float],
    *,
    tokens: Callable[[int], int] = lambda number: 60,
    request_class: str = "chat",
) -> list[str]:
    """Drafters of `count` requests, one after another, whose answers come `gains` times as fast as plain ones."""
    chosen: list[str] = []
    for number in range(count):
        name = choice.choose(request_class, tuple(gains))
        emitted = tokens(number)
        choice.learn(request_class, name, emitted, emitted / gains.get(name, 1.0))
        chosen.append(name)
    return chosen


def test_every_candidate_is_tried_in_the_order_given() -> None:
    choice = DrafterChoice()
    assert [choice.choose("chat", THREE) for _ in range(3 * TRIALS)] == [*THREE] * TRIALS
    assert choice.choose("chat", THREE) == "eagle3", "the first guess, until an answer has ended"


def test_the_fastest_is_taken_after_its_trials_and_the_others_are_looked_at_now_and_then() -> None:
    chosen = served(DrafterChoice(), 400, {"eagle3": 1.3, "mtp": 1.6, "ngram": 1.1})
    counts = Counter(chosen[3 * TRIALS :])
    assert counts["mtp"] > 0.9 * (400 - 3 * TRIALS)
    assert counts["eagle3"] > 5
    assert counts["ngram"] > 5
    assert counts["eagle3"] + counts["ngram"] <= 400 / EXPLORED_EVERY + 1


@pytest.mark.parametrize("later", ["eagle3", "ngram"])
def test_a_change_is_followed_within_a_hundred_requests(later: str) -> None:
    choice = DrafterChoice()
    served(choice, 300, {"eagle3": 1.3, "mtp": 1.6, "ngram": 1.1})
    changed = {"eagle3": 1.1, "mtp": 1.0, "ngram": 1.1} | {later: 1.7}
    served(choice, 100, changed)
    assert Counter(served(choice, 100, changed))[later] > 80


def test_where_none_is_faster_answers_are_plain_with_rare_trials_and_one_that_gets_faster_comes_back() -> (
    None
):
    choice = DrafterChoice()
    slow = {"eagle3": 0.97, "mtp": 0.99, "ngram": 0.995}
    served(choice, 100, slow)
    counts = Counter(served(choice, 320, slow))
    assert counts[PLAIN] >= 320 - 320 / EXPLORED_EVERY
    assert min(counts[name] for name in THREE) > 0, "none is given up"
    faster = slow | {"mtp": 1.5}
    served(choice, 200, faster)
    assert Counter(served(choice, 100, faster))["mtp"] > 80


def test_a_gain_within_its_doubt_is_no_gain_and_is_looked_into() -> None:
    choice = DrafterChoice()
    counts = Counter(served(choice, 40, {"ngram": 1.05, "mtp": 0.9}, tokens=lambda number: 20))
    assert counts[PLAIN] > 20, "a few short answers do not show five per cent"
    assert counts["ngram"] >= 40 / DOUBTED_EVERY - 2
    assert Counter(served(choice, 200, {"ngram": 1.05, "mtp": 0.9}, tokens=lambda number: 200))["ngram"] > 150


def test_a_candidate_that_cannot_be_the_fastest_is_tried_no_further() -> None:
    choice = DrafterChoice()
    counts = Counter(served(choice, 6, {"specinfer": 2.0, "medusa": 0.9}, tokens=lambda number: 100))
    assert counts == {"specinfer": 5, "medusa": 1}


def test_one_that_may_be_faster_than_what_is_taken_is_looked_into_until_that_is_known() -> None:
    choice = DrafterChoice()
    for _ in range(TRIALS):
        for name in ("ngram", "eagle3"):
            assert choice.choose("chat", ("ngram", "eagle3")) == name
    for _ in range(TRIALS):
        choice.learn("chat", "ngram", 26, 20)
        choice.learn("chat", "eagle3", 22, 19)
    assert choice.best("chat", ("ngram", "eagle3")) == "ngram", "a few short answers"
    counts = Counter(served(choice, 24, {"ngram": 1.3, "eagle3": 1.5}))
    assert counts["eagle3"] >= 20, "its doubt reached beyond the other's gain"


def test_one_lucky_answer_does_not_make_a_drafter_fast() -> None:
    choice = DrafterChoice()
    for _ in range(2 * TRIALS):
        choice.choose("chat", ("ngram", "mtp"))
    for _ in range(9):
        choice.learn("chat", "ngram", 60, 62)
    choice.learn("chat", "ngram", 60, 12)
    assert choice.best("chat", ("ngram", "mtp")) == PLAIN


def test_classes_do_not_share_what_they_showed() -> None:
    choice = DrafterChoice()
    served(choice, 50, {"eagle3": 1.0, "ngram": 2.0}, request_class="code")
    served(choice, 50, {"eagle3": 2.0, "ngram": 1.0}, request_class="chat")
    assert choice.best("code", ("eagle3", "ngram")) == "ngram"
    assert choice.best("chat", ("eagle3", "ngram")) == "eagle3"
    assert choice.best("creative", ("eagle3", "ngram")) == "eagle3", "nothing known: the first guess"


def test_asking_for_the_best_counts_nothing() -> None:
    choice = DrafterChoice()
    for _ in range(50):
        assert choice.best("chat", THREE) == "eagle3"
    assert choice.choose("chat", THREE) == "eagle3"
    assert choice.choose("chat", THREE) == "mtp"


def test_requests_at_once_are_spread_over_the_trials() -> None:
    choice = DrafterChoice()
    burst = Counter(choice.choose("chat", THREE) for _ in range(32))
    assert all(burst[name] >= TRIALS for name in THREE)


def test_in_company_three_trials_in_four_go_to_the_candidate_that_most_answers_use() -> None:
    choice = DrafterChoice()
    company = Counter({"mtp": 2, "none": 5})
    begun = [choice.choose("chat", THREE, company) for _ in range(8)]
    assert begun == ["mtp"] * 3 + ["eagle3"] + ["mtp"] * 3 + ["ngram"]
    assert choice.choose("code", THREE, Counter({"none": 5})) == THREE[0], "nobody to keep company with"


def test_what_says_nothing_is_not_learnt() -> None:
    choice = DrafterChoice()
    choice.learn("chat", "ngram", 60, 20)
    choice.choose("chat", ("ngram", "mtp"))
    choice.learn("chat", "ngram", 0, 0.0)
    choice.learn("chat", PLAIN, 60, 60)
    choice.learn("chat", "medusa", 60, 20)
    assert choice.best("chat", ("ngram", "mtp")) == "ngram", "as if nothing had ended"
    choice.learn("chat", "ngram", 0, 64.0)
    assert choice.best("chat", ("ngram", "mtp")) == PLAIN, "a drafter that failed"


def test_a_hundred_thousand_requests_keep_numbers_finite() -> None:
    choice = DrafterChoice()
    served(choice, 20, {"ngram": 1.4, "mtp": 1.2})
    for _ in range(100_000):
        choice.choose("chat", ("ngram",))
    assert choice.best("chat", ("ngram", "mtp")) in ("ngram", "mtp", PLAIN)
    assert Counter(served(choice, 200, {"ngram": 1.4, "mtp": 1.2}))["ngram"] > 150
