"""The heaviest part of a trie is that of the whole trie, though it is never built."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from decode.draft import Draft
from decode.drafters.trie import heaviest

END = 3


def paths_of(draft: Draft) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = [()]
    for token_id, parent in zip(draft.token_ids, draft.parents, strict=True):
        paths.append((*paths[parent], token_id))
    return paths[1:]


def weight(texts: Sequence[Sequence[int]], path: tuple[int, ...]) -> int:
    return sum(tuple(text[: len(path)]) == path for text in texts)


@given(
    texts=st.lists(st.lists(st.integers(0, END), max_size=6), max_size=8),
    width=st.integers(1, 3),
    max_nodes=st.integers(0, 12),
)
def test_nodes_are_taken_by_weight_behind_their_parents(
    texts: list[list[int]], width: int, max_nodes: int
) -> None:
    draft = heaviest(texts, width, max_nodes, END)
    paths = paths_of(draft)
    assert len(set(paths)) == len(paths) <= max_nodes
    held = [text[: text.index(END)] if END in text else text for text in texts]
    weights = [weight(held, path) for path in paths]
    assert all(weights)
    assert weights == sorted(weights, reverse=True)
    for parent in [(), *paths]:
        children = [path for path in paths if path[:-1] == parent]
        everyone = {tuple(text[: len(parent) + 1]) for text in held if tuple(text[: len(parent)]) == parent}
        others = {path for path in everyone if len(path) > len(parent)} - set(children)
        assert len(children) <= width
        if len(paths) < max_nodes:
            assert len(children) == min(width, len(children) + len(others))
        for other in others:
            assert weight(held, other) <= min((weight(held, child) for child in children), default=len(held))
