"""Cutting drafts to what has room."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decode.draft import Draft
from decode.drafting import cut_draft, leading_chain


@st.composite
def drafts(draw: st.DrawFn) -> Draft:
    size = draw(st.integers(0, 12))
    parents = tuple(draw(st.integers(0, node)) for node in range(size))
    probs = torch.arange(float(size))[:, None]
    return Draft(tuple(range(100, 100 + size)), parents, probs, sources=tuple(range(size)))


@settings(deadline=None)
@given(drafts(), st.integers(0, 6), st.integers(0, 12))
def test_a_cut_draft_keeps_paths_and_probabilities_of_the_nodes_that_stay(
    draft: Draft, depth: int, max_nodes: int
) -> None:
    cut = cut_draft(draft, depth, max_nodes)
    assert len(cut.token_ids) <= max_nodes
    assert all(node_depth <= depth for node_depth in cut.depths())
    assert set(paths(cut)) <= set(paths(draft))
    if cut.draft_probs is not None:
        assert cut.draft_probs[:, 0].tolist() == [float(token_id - 100) for token_id in cut.token_ids]
    assert cut.sources == tuple(token_id - 100 for token_id in cut.token_ids)


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
    found: list[tuple[int, ...]] = [()]
    for token_id, parent in zip(draft.token_ids, draft.parents, strict=True):
        found.append((*found[parent], token_id))
    return found
