"""Prompt lookup: what it proposes, how its index grows, and that drafts keep to their limits (CASES S12)."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.drafter_settings import NgramSettings
from core.records import SamplingParams
from decode.draft import Draft
from decode.drafters.ngram import NgramDrafter
from decode.drafters.protocol import DraftBudget, DraftRequest, Observation
from decode.sampling.history import TokenHistory
from engine.block_table import BlockTable


def request_of(token_ids: Sequence[int], width: int = 1, key: int = 1) -> DraftRequest:
    return DraftRequest(
        key=key,
        history=TokenHistory(token_ids),
        sampling=SamplingParams(),
        seed=0,
        choice=0,
        verification="invariant",
        hidden=lambda start, end: torch.empty(0),
        draft_width=width,
        table=BlockTable,
    )


def propose(
    token_ids: Sequence[int], depth: int = 4, width: int = 1, max_nodes: int = 64, **settings: int
) -> Draft:
    drafter = NgramDrafter(NgramSettings(**settings))
    request = request_of(token_ids, width)
    drafter.start(request)
    return drafter.propose([DraftBudget(request, depth, max_nodes)])[0]


def test_it_continues_as_the_text_did_the_last_time() -> None:
    assert propose([1, 2, 3, 4, 5, 6, 1, 2]).token_ids == (3, 4, 5, 6)


def test_the_longest_match_wins_over_the_latest() -> None:
    text = [9, 1, 2, 7, 7, 7, 5, 1, 2, 8, 8, 8, 9, 1, 2]
    assert propose(text, depth=3).token_ids == (7, 7, 7)


def test_among_equal_matches_the_latest_wins() -> None:
    assert propose([1, 2, 7, 7, 1, 2, 8, 8, 1, 2], depth=2).token_ids == (8, 8)


def test_nothing_is_proposed_where_the_latest_tokens_are_new() -> None:
    assert propose([1, 2, 3, 4]).token_ids == ()
    assert propose([1, 2]).token_ids == ()
    assert propose([1]).token_ids == ()


def test_a_repetition_that_runs_into_the_present_goes_on() -> None:
    assert propose([5, 1, 2, 1, 2], depth=5).token_ids == (1, 2, 1, 2, 1)
    assert propose([3, 3, 3], depth=4).token_ids == (3, 3, 3, 3)


def test_a_tree_merges_distinct_continuations() -> None:
    draft = propose([1, 2, 7, 7, 1, 2, 8, 5, 1, 2, 8, 6, 1, 2], depth=2, width=3)
    paths = set()
    for node in range(len(draft.token_ids)):
        path, row = [], node + 1
        while row:
            path.append(draft.token_ids[row - 1])
            row = draft.parents[row - 1]
        paths.add(tuple(reversed(path)))
    assert paths == {(8,), (8, 6), (8, 5), (7,), (7, 7)}


def test_drafts_keep_to_length_width_and_nodes() -> None:
    long_match = list(range(500)) + list(range(10))
    assert len(propose(long_match, depth=16, max_match=400).token_ids) == 16
    assert len(propose(long_match, depth=16, max_nodes=5).token_ids) == 5
    assert propose(long_match, depth=0).token_ids == ()


def test_the_index_grows_by_what_is_emitted() -> None:
    drafter = NgramDrafter(NgramSettings())
    request = request_of([1, 2, 3])
    drafter.start(request)
    request.history.extend([4, 1, 2])
    drafter.observe([Observation(request, Draft(), (), (4, 1, 2))])
    assert drafter.propose([DraftBudget(request, 2, 2)])[0].token_ids == (3, 4)


def test_finishing_forgets_and_check_sees_what_was_forgotten() -> None:
    drafter = NgramDrafter(NgramSettings())
    request = request_of([1, 2, 3])
    drafter.start(request)
    with pytest.raises(AssertionError):
        drafter.check()
    drafter.finish(request)
    drafter.finish(request)
    drafter.check()


@settings(deadline=None)
@given(
    prompt=st.lists(st.integers(0, 3), max_size=30),
    bursts=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), max_size=10),
    width=st.integers(1, 4),
    min_match=st.integers(1, 3),
)
def test_an_index_grown_step_by_step_equals_one_built_at_once(
    prompt: list[int], bursts: list[list[int]], width: int, min_match: int
) -> None:
    settings = NgramSettings(min_match=min_match)
    grown, built = NgramDrafter(settings), NgramDrafter(settings)
    request = request_of(prompt, width)
    grown.start(request)
    for burst in bursts:
        request.history.extend(burst)
        grown.observe([Observation(request, Draft(), (), tuple(burst))])
    built.rebuild(request)
    budget = [DraftBudget(request, 5, 12)]
    draft = grown.propose(budget)[0]
    assert draft == built.propose(budget)[0]
    assert len(draft.token_ids) <= 12
    assert all(depth <= 5 for depth in draft.depths())
    assert all(parent <= node for node, parent in enumerate(draft.parents))
