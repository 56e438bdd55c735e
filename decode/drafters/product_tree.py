"""Trees over levels that do not depend on the path: the best paths of a product of distributions, best first.

Every node of a level has the same children, so a node is a depth and a rank, and a path is as likely as the product of
its ranks' probabilities. Nodes are chosen by that alone, which is for deterministic children only (DESIGN §5).
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from decode.draft import NO_DRAFT, Draft


@dataclass(frozen=True, slots=True)
class Level:
    """What may come at one depth, best first. `scores`: log-probabilities, descending."""

    token_ids: Sequence[int]
    scores: Sequence[float]


@dataclass(frozen=True, slots=True)
class TreeShape:
    """Node j has depth `depths[j]` (from 0), rank `ranks[j]` at that depth, and row `parents[j]` above it."""

    depths: tuple[int, ...]
    ranks: tuple[int, ...]
    parents: tuple[int, ...]

    def filled(self, levels: Sequence[Level]) -> Draft:
        """The tree with the tokens of `levels`."""
        if not self.parents:
            return NO_DRAFT
        token_ids = (
            levels[depth].token_ids[rank] for depth, rank in zip(self.depths, self.ranks, strict=True)
        )
        return Draft(tuple(token_ids), self.parents)


def best_shape(scores: Sequence[Sequence[float]], max_nodes: int, least: float) -> TreeShape:
    """The `max_nodes` likeliest nodes, likeliest first, none less likely than `least` (a logarithm).

    `scores[depth][rank]`: log-probabilities, descending at each depth. A node's next sibling and first child wait in a
    heap from when it is taken, so the work is nodes · log nodes, however many paths there are. Among equals the one
    that was found first.
    """
    depths: list[int] = []
    ranks: list[int] = []
    parents: list[int] = []
    waiting: list[tuple[float, int, int, int, int, float]] = []
    found = 0

    def offer(depth: int, rank: int, parent: int, before: float) -> None:
        nonlocal found
        if depth < len(scores) and rank < len(scores[depth]) and before + scores[depth][rank] >= least:
            heapq.heappush(waiting, (-(before + scores[depth][rank]), found, depth, rank, parent, before))
            found += 1

    offer(0, 0, 0, 0.0)
    while waiting and len(parents) < max_nodes:
        cost, _, depth, rank, parent, before = heapq.heappop(waiting)
        depths.append(depth)
        ranks.append(rank)
        parents.append(parent)
        offer(depth + 1, 0, len(parents), -cost)
        offer(depth, rank + 1, parent, before)
    return TreeShape(tuple(depths), tuple(ranks), tuple(parents))
