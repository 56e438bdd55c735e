"""A merged tree holds every path of its members and no other, and each member hears what became of its own."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decode.draft import NO_DRAFT, Draft
from decode.drafters.merging import merge_drafts, own_part
from decode.drafting import cut_draft

Path = tuple[int, ...]
VOCAB = 4


@st.composite
def trees(draw: st.DrawFn, most: int = 8) -> Draft:
    """Any tree with distinct siblings, of few tokens, so that trees overlap."""
    token_ids: list[int] = []
    parents: list[int] = []
    for _ in range(draw(st.integers(0, most))):
        parent = draw(st.integers(0, len(token_ids)))
        token_id = draw(st.integers(0, VOCAB - 1))
        if (parent, token_id) not in zip(parents, token_ids, strict=True):
            token_ids.append(token_id)
            parents.append(parent)
    return Draft(tuple(token_ids), tuple(parents))


def paths(draft: Draft) -> list[Path]:
    """The path of every row, the root's first."""
    found: list[Path] = [()]
    for token_id, parent in zip(draft.token_ids, draft.parents, strict=True):
        found.append((*found[parent], token_id))
    return found


def drawn(draft: Draft, mark: float) -> Draft:
    """The same tree with probabilities that tell whose node it is."""
    return Draft(draft.token_ids, draft.parents, torch.full((len(draft.token_ids), VOCAB), mark))


@settings(deadline=None)
@given(st.lists(trees(), min_size=1, max_size=4))
def test_equal_paths_become_one_and_none_is_lost_or_made_up(drafts: list[Draft]) -> None:
    merged = merge_drafts(drafts, keep_equal=False)
    found = paths(merged)
    assert len(found) == len(set(found))
    assert set(found) == {path for draft in drafts for path in paths(draft)}
    assert merged.sources == ()


@settings(deadline=None)
@given(st.lists(trees(), min_size=2, max_size=4))
def test_under_rejection_every_node_keeps_its_trial_and_its_own_probabilities(drafts: list[Draft]) -> None:
    merged = merge_drafts(
        [drawn(draft, float(number)) for number, draft in enumerate(drafts)], keep_equal=True
    )
    found = paths(merged)
    assert sorted(found[1:]) == sorted(path for draft in drafts for path in paths(draft)[1:])
    if sum(bool(draft.token_ids) for draft in drafts) < 2:
        return
    assert merged.draft_probs is not None
    marks = [int(row[0]) for row in merged.draft_probs]
    for number, draft in enumerate(drafts):
        own = [path for path, mark in zip(found[1:], marks, strict=True) if mark == number]
        assert own == paths(draft)[1:], "its nodes in its order"
    assert len(set(zip(marks, merged.sources, strict=True))) == len(set(marks)) == len(set(merged.sources))
    children_of = set(merged.parents) - {0}
    for row in children_of:
        equal = [
            other + 1
            for other, token_id in enumerate(merged.token_ids)
            if (merged.parents[other], token_id) == (merged.parents[row - 1], merged.token_ids[row - 1])
        ]
        assert row == equal[0], "what was drafted behind equal siblings is behind the first tried"


def test_deterministic_nodes_beside_drawn_ones_are_one_hot() -> None:
    certain = Draft((2, 3), (0, 1))
    merged = merge_drafts([certain, drawn(Draft((2,), (0,)), 0.25)], keep_equal=True)
    assert merged.token_ids == (2, 3, 2)
    assert merged.parents == (0, 1, 0)
    assert merged.draft_probs is not None
    assert merged.draft_probs.tolist() == [[0, 0, 1, 0], [0, 0, 0, 1], [0.25] * 4]
    assert merge_drafts([certain, Draft((2,), (0,))], keep_equal=True).draft_probs is None


def test_one_draft_alone_is_itself() -> None:
    draft = drawn(Draft((1,), (0,)), 0.25)
    assert merge_drafts([NO_DRAFT, draft], keep_equal=True) is draft
    assert merge_drafts([NO_DRAFT, NO_DRAFT], keep_equal=False) == NO_DRAFT


def test_auxiliary_rows_keep_their_ancestors() -> None:
    first = Draft((7, 8), (0, 1), auxiliary_token_ids=(20, 21), auxiliary_parents=(0, 3))
    second = Draft((7, 9), (0, 1), auxiliary_token_ids=(30, 31), auxiliary_parents=(2, 3))
    merged = merge_drafts([first, second], keep_equal=False)
    assert merged.token_ids == (7, 8, 9)
    assert merged.auxiliary_token_ids == (20, 21, 30, 31)
    # rows: 0 root, 1 to 3 nodes, 4 and 5 of the first, 6 and 7 of the second
    assert merged.auxiliary_parents == (0, 4, 3, 6)


@settings(deadline=None)
@given(st.lists(trees(), min_size=1, max_size=4), st.integers(1, 12), st.booleans(), st.data())
def test_each_member_hears_the_longest_prefix_of_the_accepted_path_that_it_drafted(
    drafts: list[Draft], max_nodes: int, keep_equal: bool, data: st.DataObject
) -> None:
    verified = cut_draft(merge_drafts(drafts, keep_equal=keep_equal), 64, max_nodes)
    found = paths(verified)
    accepted = data.draw(st.sampled_from(found))
    for draft in drafts:
        part, rows = own_part(draft, verified, accepted, with_auxiliary=True)
        known = paths(part)
        assert set(known) == set(paths(draft)) & set(found), "what was cut is as if never drafted"
        assert [known[row] for row in rows] == [accepted[: depth + 1] for depth in range(len(rows))]
        assert accepted[: len(rows) + 1] not in known[1:] or len(rows) == len(accepted)
        if part is not draft:
            assert len(known) < len(paths(draft))


def test_auxiliary_rows_that_were_not_evaluated_are_not_told_of() -> None:
    draft = Draft((7,), (0,), auxiliary_token_ids=(20,), auxiliary_parents=(0,))
    part, rows = own_part(draft, Draft((7,), (0,)), (7,), with_auxiliary=False)
    assert (part.token_ids, part.auxiliary_token_ids, rows) == ((7,), (), (1,))


def test_auxiliary_rows_keep_their_parents_where_nodes_are_cut() -> None:
    draft = Draft((6, 7, 8), (0, 0, 2), auxiliary_token_ids=(20, 21), auxiliary_parents=(2, 4))
    part, rows = own_part(draft, Draft((7,), (0,)), (7,), with_auxiliary=True)
    assert (part.token_ids, part.parents, rows) == ((7,), (0,), (1,))
    assert (part.auxiliary_token_ids, part.auxiliary_parents) == ((20, 21), (1, 2))


def test_the_fault_of_one_is_told_only_where_none_has_a_draft() -> None:
    broken = Draft(fault="draft_not_finite")
    assert merge_drafts([NO_DRAFT, broken], keep_equal=False) is broken
    assert merge_drafts([Draft((1,), (0,)), broken], keep_equal=False).fault == ""
