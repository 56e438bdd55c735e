"""Several continuations of one text, merged to a tree whose nodes weigh as much as texts go through them."""

import heapq
from collections.abc import Sequence

from decode.draft import Draft


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
