"""Several continuations of one text as one draft: the first ones, or those that most texts go through."""

import heapq
from collections.abc import Iterable, Sequence

from decode.draft import Draft


def merge_paths(paths: Iterable[Sequence[int]], width: int, max_nodes: int) -> Draft:
    """The trie of the first `width` distinct paths, in their order, as far as `max_nodes` nodes go.

    Siblings are distinct. A path that lies within those before it is not counted.
    """
    nodes: list[int] = []
    parents: list[int] = []
    children: dict[tuple[int, int], int] = {}
    branches = 0
    for path in paths:
        if branches == width or len(nodes) == max_nodes:
            break
        row = 0
        added = False
        for token_id in path:
            child = children.get((row, token_id))
            if child is None:
                if len(nodes) == max_nodes:
                    break
                nodes.append(token_id)
                parents.append(row)
                child = len(nodes)
                children[row, token_id] = child
                added = True
            row = child
        branches += added
    return Draft(tuple(nodes), tuple(parents))


def heaviest(texts: Sequence[Sequence[int]], width: int, max_nodes: int, num_token_ids: int) -> Draft:
    """The heaviest nodes of the trie of `texts`, at most `width` children each; among equals the first seen.

    A text ends at the first id that is none of the vocabulary: there a document ended.
    """
    token_ids: list[int] = []
    parents: list[int] = []
    open_nodes: list[tuple[int, int, int, int, list[Sequence[int]]]] = []
    opened = 0

    def open_children(through: Sequence[Sequence[int]], depth: int, row: int) -> None:
        nonlocal opened
        children: dict[int, list[Sequence[int]]] = {}
        for text in through:
            if depth < len(text) and text[depth] < num_token_ids:
                children.setdefault(text[depth], []).append(text)
        for child in sorted(children.values(), key=len, reverse=True)[:width]:
            heapq.heappush(open_nodes, (-len(child), opened, row, depth, child))
            opened += 1

    open_children(texts, 0, 0)
    while open_nodes and len(token_ids) < max_nodes:
        _, _, row, depth, through = heapq.heappop(open_nodes)
        token_ids.append(through[0][depth])
        parents.append(row)
        open_children(through, depth + 1, len(token_ids))
    return Draft(tuple(token_ids), tuple(parents))
