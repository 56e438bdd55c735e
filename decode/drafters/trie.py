"""Several continuations of one text as one draft: the first ones, or those that most texts go through."""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

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


@dataclass(slots=True)
class _Node:
    token_id: int
    weight: int = 0
    children: "dict[int, _Node]" = field(default_factory=dict)


def heaviest(texts: Sequence[Sequence[int]], width: int, max_nodes: int, num_token_ids: int) -> Draft:
    """The heaviest nodes of the trie of `texts`, at most `width` children each; among equals the first seen.

    A text ends at the first id that is none of the vocabulary: there a document ended.
    """
    root = _Node(-1)
    for text in texts:
        node = root
        for token_id in text:
            if token_id >= num_token_ids:
                break
            child = node.children.get(token_id)
            if child is None:
                child = node.children[token_id] = _Node(token_id)
            node = child
            node.weight += 1
    token_ids: list[int] = []
    parents: list[int] = []
    open_nodes: list[tuple[int, int, int, _Node]] = []
    opened = 0

    def open_children(node: _Node, row: int) -> None:
        nonlocal opened
        for child in sorted(node.children.values(), key=lambda child: -child.weight)[:width]:
            heapq.heappush(open_nodes, (-child.weight, opened, row, child))
            opened += 1

    open_children(root, 0)
    while open_nodes and len(token_ids) < max_nodes:
        _, _, row, node = heapq.heappop(open_nodes)
        token_ids.append(node.token_id)
        parents.append(row)
        open_children(node, len(token_ids))
    return Draft(tuple(token_ids), tuple(parents))
