"""Several continuations of one text as one draft."""

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
