"""Earlier answers, held: what is found, what is forgotten, and whose."""

from array import array
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode.drafters.answer_index import AnswerIndex, Place
from decode.drafters.answer_record import AnswerRecord, Owner, prompt_of

MAX_TOKENS = 64
TENANT_TOKENS = 24


def owner(tenant: int, salt: int = 0) -> Owner:
    return Owner(bytes([tenant]) * 16, bytes([tenant, salt]) * 8)


def record(prompt: Sequence[int], answer: Sequence[int], whose: Owner | None = None) -> AnswerRecord:
    token_ids = array("I", [*prompt[-4:], *answer])
    return AnswerRecord(whose or owner(0), prompt_of(prompt, b""), min(4, len(prompt)), token_ids)


def index(max_tokens: int = 10_000, tenant_tokens: int = 10_000, min_match: int = 2) -> AnswerIndex:
    return AnswerIndex(max_tokens, tenant_tokens, min_match, max_match=4)


def goes_on(places: Sequence[Place], depth: int = 3) -> list[list[int]]:
    return [answer.record.token_ids[end : end + depth].tolist() for answer, end in places]


def after_prompt(held: AnswerIndex, prompt: Sequence[int], whose: Owner | None = None) -> list[list[int]]:
    return goes_on(held.after_prompt(whose or owner(0), prompt_of(prompt, b""), prompt))


def test_an_answer_is_found_by_its_prompt_before_its_first_token() -> None:
    held = index()
    held.put(record([1, 2, 3, 4, 5], [6, 7, 8, 9]))
    assert after_prompt(held, [1, 2, 3, 4, 5]) == [[6, 7, 8]]


def test_the_same_prompt_comes_before_prompts_that_only_end_alike() -> None:
    held = index()
    held.put(record([1, 2, 3, 4, 5], [6, 7, 8]))
    held.put(record([9, 2, 3, 4, 5], [10, 11, 12]))
    assert after_prompt(held, [1, 2, 3, 4, 5]) == [[6, 7, 8]]
    assert after_prompt(held, [7, 2, 3, 4, 5]) == [[10, 11, 12], [6, 7, 8]]
    assert after_prompt(held, [2, 3, 4, 6]) == []


def test_the_longest_match_is_found_latest_first() -> None:
    held = index()
    held.put(record([1], [5, 6, 7, 30]))
    held.put(record([2], [8, 6, 7, 31]))
    held.put(record([3], [5, 6, 7, 32]))
    assert goes_on(held.after(owner(0), [5, 6, 7]), 1) == [[32], [30]]
    assert goes_on(held.after(owner(0), [9, 6, 7]), 1) == [[32], [31], [30]]
    assert held.after(owner(0), [9, 9, 7]) == []
    assert held.after(owner(0), [7]) == []


def test_a_prompts_own_text_is_not_proposed() -> None:
    held = index()
    held.put(record([1, 2, 3, 4], [5, 6]))
    assert held.after(owner(0), [1, 2]) == []
    assert goes_on(held.after(owner(0), [3, 4])) == [[5, 6]]
    assert held.after(owner(0), [5, 6]) == []


def test_what_one_holds_is_not_seen_by_another_tenant_or_salt() -> None:
    held = index()
    held.put(record([1, 2], [3, 4, 5, 6], owner(1, 1)))
    for other in (owner(2, 1), owner(1, 2)):
        assert after_prompt(held, [1, 2], other) == []
        assert held.after(other, [3, 4]) == []
    assert goes_on(held.after(owner(1, 1), [3, 4])) == [[5, 6]]


def test_an_answer_that_goes_further_takes_the_place_of_the_shorter_one() -> None:
    held = index()
    assert held.put(record([1, 2], [3, 4, 5]))
    assert held.put(record([1, 2], [3, 4, 5, 6, 7]))
    assert not held.put(record([1, 2], [3, 4, 5, 6, 7]))
    assert not held.put(record([1, 2], [3, 4]))
    assert (held.num_answers, held.num_tokens) == (1, 7)
    assert held.put(record([1, 2], [3, 9]))
    assert held.num_answers == 2
    held.check()


def test_the_answers_to_one_prompt_are_bounded() -> None:
    held = index()
    for first in range(100):
        held.put(record([1, 2], [first, 3, 4]))
    assert held.num_answers == 64
    assert len(held.after(owner(0), [3, 4])) == 0
    assert len(after_prompt(held, [1, 2])) == 64
    held.check()


def test_a_run_that_occurs_everywhere_leads_to_its_latest_places() -> None:
    held = index()
    for number in range(200):
        held.put(record([number, 1], [7, 7, number + 100]))
    assert len(held.after(owner(0), [7, 7])) == 64
    assert goes_on(held.after(owner(0), [7, 7]), 1)[0] == [299]


def test_the_answer_used_least_recently_is_forgotten_first() -> None:
    held = index(max_tokens=15)
    for number in range(3):
        held.put(record([number], [10 + number, 20, 30, 40]))
    held.use(answer for answer, _ in held.after_prompt(owner(0), prompt_of([0], b""), [0]))
    held.put(record([3], [13, 20, 30, 40]))
    assert [bool(after_prompt(held, [number])) for number in range(4)] == [True, False, True, True]
    assert held.num_evicted == 1


def test_an_answer_beyond_the_bound_is_not_taken() -> None:
    held = index(max_tokens=8)
    held.put(record([1], [2, 3, 4]))
    assert not held.put(record([1], list(range(10, 20))))
    assert held.num_answers == 1


def test_a_tenant_may_fill_what_others_leave_and_loses_it_first() -> None:
    held = index(max_tokens=40, tenant_tokens=20)
    for number in range(8):
        held.put(record([number], [1, 2, 3, 4], owner(1)))
    assert held.num_tokens == 40
    for number in range(4):
        held.put(record([number], [1, 2, 3, 4], owner(2)))
    assert [bool(after_prompt(held, [number], owner(1))) for number in range(8)] == [False] * 4 + [True] * 4
    assert all(after_prompt(held, [number], owner(2)) for number in range(4))


def test_many_salts_do_not_make_many_shares() -> None:
    held = index(max_tokens=40, tenant_tokens=10)
    held.put(record([1], [2, 3, 4, 5], owner(1)))
    for salt in range(50):
        held.put(record([1], [2, 3, 4, 5], owner(2, salt)))
    assert after_prompt(held, [1], owner(1))


def test_check_sees_a_wrong_sum() -> None:
    held = index()
    held.put(record([1], [2, 3, 4]))
    held.check()
    held.num_tokens += 1
    with pytest.raises(AssertionError):
        held.check()


CALLS = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.integers(0, 1),
        st.lists(st.integers(0, 2), min_size=1, max_size=5),
        st.lists(st.integers(0, 2), min_size=1, max_size=12),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(CALLS)
def test_a_tenant_beyond_its_share_never_pushes_out_one_within(
    calls: list[tuple[int, int, list[int], list[int]]],
) -> None:
    held = index(MAX_TOKENS, TENANT_TOKENS)
    for tenant, salt, prompt, answer in calls:
        before = {other: _texts(held, other) for other in range(4)}
        held.put(record(prompt, answer, owner(tenant, salt)))
        held.check()
        now = {other: _texts(held, other) for other in range(4)}
        assert sum(_size(texts) for texts in now.values()) <= MAX_TOKENS
        if _size(now[tenant]) > TENANT_TOKENS:
            for other in {0, 1, 2, 3} - {tenant}:
                assert now[other] == before[other] or _size(before[other]) > TENANT_TOKENS


def _texts(held: AnswerIndex, tenant: int) -> list[bytes]:
    """What is held of a tenant."""
    found = [answer for answer in held._order.values() if answer.record.owner.tenant == owner(tenant).tenant]
    return sorted(answer.record.token_ids.tobytes() for answer in found)


def _size(texts: Sequence[bytes]) -> int:
    return sum(map(len, texts)) // 4


@settings(max_examples=150, deadline=None)
@given(CALLS, st.lists(st.integers(0, 2), min_size=1, max_size=6))
def test_it_finds_what_a_search_of_all_that_is_held_finds(
    calls: list[tuple[int, int, list[int], list[int]]], last: list[int]
) -> None:
    held = index(MAX_TOKENS, TENANT_TOKENS)
    for tenant, salt, prompt, answer in calls:
        held.put(record(prompt, answer, owner(tenant, salt)))
    for tenant in range(4):
        for salt in range(2):
            found = held.after(owner(tenant, salt), last)
            assert {(answer.number, end) for answer, end in found} == _searched(
                held, owner(tenant, salt), last
            )


def _searched(held: AnswerIndex, whose: Owner, last: Sequence[int]) -> set[tuple[int, int]]:
    """By looking at every place."""
    for length in range(min(4, len(last)), 1, -1):
        run = list(last[-length:])
        found = {
            (answer.number, end)
            for answer in held._order.values()
            if answer.record.owner == whose
            for end in range(max(length, answer.record.num_prompt), len(answer.record.token_ids))
            if answer.record.token_ids[end - length : end].tolist() == run
        }
        if found:
            return found
    return set()
