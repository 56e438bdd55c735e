"""The cache of earlier answers as the decode loop calls it: on every path it keeps the answer once, and no trail."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.drafter_settings import CacheSettings
from decode.draft import Draft
from decode.drafters.answer_link import AnswerLink
from decode.drafters.cache import CacheDrafter
from decode.drafters.protocol import DraftBudget, DraftRequest, Observation
from tests.unit.decode.drafters.test_ngram import request_of

PROMPT = tuple(range(100, 130))
ANSWER = tuple(range(1, 13))
VOCAB = 200


def drafter(**values: int | float) -> CacheDrafter:
    return CacheDrafter(CacheSettings.model_validate({"min_match": 2, **values}), VOCAB)


def request(
    prompt: Sequence[int] = PROMPT, key: int = 1, width: int = 1, isolation: str = "tenant/salt"
) -> DraftRequest:
    return replace(request_of(prompt, width, key), isolation=isolation)


def answered(
    cache: CacheDrafter, answer: Sequence[int] = ANSWER, asked: DraftRequest | None = None
) -> DraftRequest:
    """A request from its start to its end, three tokens a step."""
    asked = asked or request()
    cache.start(asked)
    for first in range(0, len(answer), 3):
        emit(cache, asked, answer[first : first + 3])
    cache.finish(asked)
    return asked


def emit(cache: CacheDrafter, asked: DraftRequest, token_ids: Sequence[int]) -> None:
    asked.history.extend(token_ids)
    cache.observe([Observation(asked, Draft(), (), tuple(token_ids))])


def propose(cache: CacheDrafter, asked: DraftRequest, depth: int = 4, max_nodes: int = 64) -> Draft:
    return cache.propose([DraftBudget(asked, depth, max_nodes)])[0]


def test_a_repeated_request_is_drafted_from_its_first_token_to_its_last() -> None:
    cache = drafter()
    answered(cache)
    again = request(key=2)
    cache.start(again)
    assert propose(cache, again).token_ids == ANSWER[:4]
    emit(cache, again, ANSWER[:5])
    assert propose(cache, again).token_ids == ANSWER[5:9]
    emit(cache, again, ANSWER[5:11])
    assert propose(cache, again).token_ids == ANSWER[11:]
    emit(cache, again, ANSWER[11:])
    assert propose(cache, again).token_ids == ()
    cache.finish(again)
    assert cache.held()["answers"] == 1
    cache.check()


def test_another_request_that_comes_to_the_same_words_goes_on_alike() -> None:
    cache = drafter()
    answered(cache)
    other = request([50, 51, 52], key=2)
    cache.start(other)
    emit(cache, other, [60, 3, 4, 5])
    assert propose(cache, other).token_ids == (6, 7, 8, 9)
    emit(cache, other, [6, 99, 98])
    assert propose(cache, other).token_ids == ()


def test_what_agrees_is_followed_though_later_answers_have_the_same_run() -> None:
    cache = drafter()
    answered(cache, [1, 2, 3, 4, 5, 6, 7, 8])
    for number in range(100):
        answered(cache, [20 + number % 70, 3, 4, *range(90, 97)], request([number], key=10 + number))
    again = request(key=2)
    cache.start(again)
    emit(cache, again, [1])
    assert propose(cache, again, 3).token_ids == (2, 3, 4)
    emit(cache, again, [2, 3, 4])
    assert propose(cache, again, 3).token_ids == (5, 6, 7)


def test_the_continuation_seen_most_often_is_proposed_and_a_tree_holds_the_others() -> None:
    cache = drafter()
    for number, last in enumerate((7, 8, 8)):
        answered(cache, [1, 2, 3, 4, last, number, 40, 41, 42], request(key=number))
    chain, tree = request(key=5), request(key=6, width=2)
    for asked in (chain, tree):
        cache.start(asked)
        emit(cache, asked, [1, 2, 3, 4])
    assert propose(cache, chain, 1).token_ids == (8,)
    assert propose(cache, tree, 1).token_ids == (8, 7)
    draft = propose(cache, tree, 3, max_nodes=3)
    assert len(draft.token_ids) == 3
    assert max(draft.depths()) <= 3


@pytest.mark.parametrize("isolation", ["tenant/other", "other/salt", "", "tenant"])
def test_nothing_is_proposed_to_whom_it_does_not_belong(isolation: str) -> None:
    cache = drafter()
    answered(cache)
    other = request(key=2, isolation=isolation)
    cache.start(other)
    assert propose(cache, other).token_ids == ()
    emit(cache, other, ANSWER[:6])
    assert propose(cache, other).token_ids == ()
    assert cache.events()["hit"] == 0


def test_short_answers_are_not_kept() -> None:
    cache = drafter()
    answered(cache, ANSWER[:7])
    assert cache.held() == {"answers": 0, "tokens": 0}
    answered(cache, ANSWER[:8])
    assert cache.held() == {"answers": 1, "tokens": 32}


def test_of_a_long_answer_the_beginning_is_kept() -> None:
    cache = drafter(max_answer_tokens=10)
    answered(cache)
    assert cache.held()["tokens"] == 24 + 10


def test_an_answer_that_is_preempted_again_and_again_is_kept_once() -> None:
    cache = drafter()
    asked = request()
    cache.start(asked)
    emit(cache, asked, ANSWER[:9])
    cache.finish(asked)
    assert cache.held()["tokens"] == 24 + 9
    for last in (10, 11, 12):
        cache.rebuild(asked)
        assert propose(cache, asked).token_ids == ()
        emit(cache, asked, ANSWER[last - 1 : last])
        cache.finish(asked)
        cache.finish(asked)
    assert cache.held() == {"answers": 1, "tokens": 24 + 12}
    cache.check()


def test_a_rebuilt_request_follows_its_earlier_answer_from_the_prompt_on() -> None:
    cache = drafter()
    answered(cache)
    resumed = request(key=2)
    resumed.history.extend(ANSWER[:7])
    cache.rebuild(resumed)
    assert propose(cache, resumed).token_ids == ANSWER[7:11]


def test_an_answer_that_is_forgotten_is_no_longer_followed() -> None:
    cache = drafter(max_tokens=4096)
    answered(cache)
    again = request(key=2)
    cache.start(again)
    assert propose(cache, again).token_ids == ANSWER[:4]
    for number in range(3):
        answered(cache, [150] * 2000, request([number], key=10 + number))
    emit(cache, again, ANSWER[:1])
    assert propose(cache, again).token_ids == ()


def test_ids_that_are_no_tokens_are_never_proposed() -> None:
    cache = drafter()
    answered(cache, [1, 2, 3, VOCAB, 5, 6, 7, 8])
    again = request(key=2)
    cache.start(again)
    assert propose(cache, again).token_ids == (1, 2, 3)


def test_check_sees_a_trail_that_is_left() -> None:
    cache = drafter()
    asked = request()
    cache.start(asked)
    with pytest.raises(AssertionError, match="1 trails"):
        cache.check()
    cache.finish(asked)
    cache.check()


def test_nothing_is_drafted_where_there_is_no_room() -> None:
    cache = drafter()
    answered(cache)
    again = request(key=2)
    cache.start(again)
    assert propose(cache, again, depth=0).token_ids == ()
    assert propose(cache, again, depth=4, max_nodes=0).token_ids == ()
    assert propose(cache, again, depth=4, max_nodes=2).token_ids == ANSWER[:2]


def linked(secret: bytes = b"secret") -> tuple[CacheDrafter, AnswerLink]:
    cache = drafter()
    link = AnswerLink(secret, cache.record_limits)
    cache.connect(link)
    return cache, link


def test_what_is_new_is_offered_once() -> None:
    cache, link = linked()
    for key in range(3):
        answered(cache, asked=request(key=key))
    (record,) = link.outgoing(10)
    assert tuple(record.token_ids) == (*PROMPT[-24:], *ANSWER)
    assert link.outgoing(10) == []


def test_answers_of_others_are_taken_in_a_few_a_step() -> None:
    giver, given = linked()
    taker, taken = linked()
    for number in range(11):
        answered(giver, asked=request([number], key=number))
    for record in given.outgoing(100):
        taken.hand_in(record)
    asked = request([10], key=50)
    taker.start(asked)
    assert taker.events()["received"] == 4
    assert propose(taker, asked).token_ids == ()
    emit(taker, asked, ANSWER[:1])
    emit(taker, asked, ANSWER[1:2])
    assert taker.held()["answers"] == 11
    assert propose(taker, asked).token_ids == ANSWER[2:6]
    taker.finish(asked)
    assert taken.outgoing(10) == []


def test_an_idle_worker_takes_all_that_came() -> None:
    giver, given = linked()
    taker, taken = linked()
    for number in range(11):
        answered(giver, asked=request([number], key=number))
    for record in given.outgoing(100):
        taken.hand_in(record)
    taker.receive_all()
    taker.receive_all()
    assert taker.held() == giver.held()
    assert not taken.has_incoming


def test_where_nobody_takes_answers_the_oldest_are_lost_and_counted() -> None:
    cache, link = linked()
    for number in range(300):
        answered(cache, asked=request([number], key=number))
    assert cache.events()["lost"] == 300 - 256
    first = link.outgoing(1)[0]
    assert first.token_ids[0] == 300 - 256


def test_workers_of_another_secret_share_nothing() -> None:
    giver, given = linked()
    taker, taken = linked(b"another")
    answered(giver)
    taken.hand_in(given.outgoing(1)[0])
    asked = request(key=5)
    taker.start(asked)
    assert propose(taker, asked).token_ids == ()


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a/1", "a/2", "b/1"]),
            st.lists(st.integers(0, 3), min_size=1, max_size=4),
            st.lists(st.integers(0, 3), min_size=1, max_size=30),
            st.integers(0, 30),
        ),
        max_size=12,
    ),
    st.integers(1, 3),
)
def test_drafts_keep_to_their_limits_and_to_what_their_owner_was_answered(
    calls: list[tuple[str, list[int], list[int], int]], width: int
) -> None:
    cache = drafter(min_answer_tokens=1)
    given_to: dict[str, list[list[int]]] = {}
    for key, (isolation, prompt, answer, preempted) in enumerate(calls):
        asked = request(prompt, key, width, isolation)
        cache.start(asked)
        for place, token_id in enumerate(answer):
            draft = propose(cache, asked, 4, 6)
            assert len(draft.token_ids) <= 6
            assert all(depth <= 4 for depth in draft.depths())
            assert all(parent <= node for node, parent in enumerate(draft.parents))
            for path in _paths(draft):
                assert any(_holds(text, path) for text in given_to.get(isolation, [])), path
            emit(cache, asked, [token_id])
            if place == preempted:
                cache.finish(asked)
                given_to.setdefault(isolation, []).append(list(answer[: place + 1]))
                cache.rebuild(asked)
        cache.finish(asked)
        given_to.setdefault(isolation, []).append(answer)
    cache.check()


def _paths(draft: Draft) -> list[list[int]]:
    paths: list[list[int]] = [[]]
    for token_id, parent in zip(draft.token_ids, draft.parents, strict=True):
        paths.append([*paths[parent], token_id])
    return paths[1:]


def _holds(text: Sequence[int], run: Sequence[int]) -> bool:
    return any(list(text[start : start + len(run)]) == list(run) for start in range(len(text)))
