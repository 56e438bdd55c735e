"""Cutting drafts to what has room."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decode.draft import NO_DRAFT, Draft
from decode.drafting import cut_draft, leading_chain


@st.composite
def drafts(draw: st.DrawFn) -> Draft:
    size = draw(st.integers(0, 12))
    parents = tuple(draw(st.integers(0, node)) for node in range(size))
    num_auxiliary = draw(st.integers(0, 8))
    auxiliary = tuple(draw(st.integers(0, size + row)) for row in range(num_auxiliary))
    return Draft(
        token_ids=tuple(range(100, 100 + size)),
        parents=parents,
        draft_probs=torch.arange(float(size))[:, None],
        auxiliary_token_ids=tuple(range(200, 200 + num_auxiliary)),
        auxiliary_parents=auxiliary,
        sources=tuple(range(size)),
    )


@settings(deadline=None)
@given(drafts(), st.integers(0, 6), st.integers(0, 20))
def test_a_cut_draft_keeps_paths_and_probabilities_of_the_nodes_that_stay(
    draft: Draft, depth: int, max_rows: int
) -> None:
    cut = cut_draft(draft, depth, max_rows)
    assert cut.num_rows <= max_rows
    assert all(node_depth <= depth for node_depth in cut.depths())
    assert set(paths(cut)) <= set(paths(draft))
    if cut.draft_probs is not None:
        assert cut.draft_probs[:, 0].tolist() == [float(token_id - 100) for token_id in cut.token_ids]
    assert cut.sources == tuple(token_id - 100 for token_id in cut.token_ids)


@settings(deadline=None)
@given(drafts(), st.integers(0, 6), st.integers(0, 20))
def test_auxiliary_rows_go_before_any_node_as_a_whole_and_else_stay_under_their_parents(
    draft: Draft, depth: int, max_rows: int
) -> None:
    cut = cut_draft(draft, depth, max_rows)
    within = [node_depth <= depth for node_depth in draft.depths()]
    kept_nodes = {token_id for token_id, stays in zip(draft.token_ids, within, strict=True) if stays}
    whole = [path for path in auxiliary_paths(draft) if all(t in kept_nodes for t in path if t < 200)]
    if len(kept_nodes) + len(whole) <= max_rows:
        assert set(cut.token_ids) == kept_nodes
        assert auxiliary_paths(cut) == whole
    else:
        assert cut.auxiliary_token_ids == cut.auxiliary_parents == ()
        assert len(cut.token_ids) == min(len(kept_nodes), max_rows)


def test_a_draft_of_auxiliary_rows_alone_is_kept_where_it_fits() -> None:
    window = Draft(auxiliary_token_ids=(7, 8), auxiliary_parents=(0, 1))
    assert cut_draft(window, 0, 2) == window
    assert cut_draft(window, 4, 1) == NO_DRAFT
    assert leading_chain(window) == window


@settings(deadline=None)
@given(drafts())
def test_a_leading_chain_keeps_the_auxiliary_rows_whose_parents_stay(draft: Draft) -> None:
    chain = leading_chain(draft)
    dropped = set(draft.token_ids) - set(chain.token_ids)
    assert auxiliary_paths(chain) == [path for path in auxiliary_paths(draft) if not dropped & set(path)]


@settings(deadline=None)
@given(drafts())
def test_a_leading_chain_follows_first_children_to_a_leaf(draft: Draft) -> None:
    chain = leading_chain(draft)
    assert chain.is_chain
    row, path = 0, []
    while row in draft.parents:
        node = draft.parents.index(row)
        path.append(node)
        row = node + 1
    assert chain.token_ids == tuple(draft.token_ids[node] for node in path)
    assert chain.sources == tuple(draft.sources[node] for node in path)
    if chain.draft_probs is not None:
        assert chain.draft_probs[:, 0].tolist() == [float(node) for node in path]


def paths(draft: Draft) -> list[tuple[int, ...]]:
    """The root's and the nodes', by row."""
    return rows_of(draft)[: 1 + len(draft.token_ids)]


def auxiliary_paths(draft: Draft) -> list[tuple[int, ...]]:
    """Those of the auxiliary rows, in order."""
    return rows_of(draft)[1 + len(draft.token_ids) :]


def rows_of(draft: Draft) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [()]
    token_ids = (*draft.token_ids, *draft.auxiliary_token_ids)
    for token_id, parent in zip(token_ids, (*draft.parents, *draft.auxiliary_parents), strict=True):
        found.append((*found[parent], token_id))
    return found
