"""A draft tree that a model grows level by level: which nodes are kept, which go on, and what is proposed in the end.

Deterministic proposals, and invariant verification in general, grow best first (EAGLE-2, Li et al. 2024): a node's
score is the sum of its path's log-probabilities, on each level the `width` best go on, and at the end the best
`max_nodes` of all are proposed. Tokens that rejection verification judges by their draft distribution may be neither
chosen nor dropped by what was drawn: there the first `width` children of the root go on, one child a level each.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from decode.draft import NO_DRAFT, Draft


@dataclass(slots=True)
class _Node:
    token_id: int
    parent: int
    depth: int
    score: float
    draft_probs: Tensor | None


@dataclass(slots=True)
class TreeGrowth:
    """One draft in the making. Node i of `nodes` is its place in order of birth; parent -1 is the root.

    `frontier`: nodes that go on; the children of frontier[i] are drawn from row i of the next forward. Before the
    first level the root alone is the frontier. `min_probability`: a path less likely goes on no further.
    """

    depth: int
    width: int
    max_nodes: int
    by_score: bool
    min_probability: float = 0.0
    nodes: list[_Node] = field(default_factory=list)
    frontier: list[int] = field(default_factory=lambda: [-1])
    level: int = 0

    @property
    def children_wanted(self) -> int:
        """Children to draw at each node of the frontier."""
        return self.width if self.by_score or self.level == 0 else 1

    def path(self, node: int) -> tuple[int, ...]:
        """Token ids from the root's child down to `node`."""
        reversed_path: list[int] = []
        while node >= 0:
            reversed_path.append(self.nodes[node].token_id)
            node = self.nodes[node].parent
        return tuple(reversed(reversed_path))

    def add(
        self, place: int, token_ids: Sequence[int], scores: Sequence[float], probs: Tensor | None
    ) -> None:
        """Children of frontier[place], in the order drawn. `scores`: log-probabilities; `probs` [vocabulary]."""
        parent = self.frontier[place]
        before = 0.0 if parent < 0 else self.nodes[parent].score
        for token_id, score in zip(token_ids, scores, strict=True):
            self.nodes.append(_Node(token_id, parent, self.level + 1, before + score, probs))

    def close_level(self) -> bool:
        """All children of this level are there: choose who goes on. Whether anyone does."""
        self.level += 1
        fresh = [index for index in range(len(self.nodes)) if self.nodes[index].depth == self.level]
        if self.level >= self.depth or (len(self.nodes) >= self.max_nodes and not self.by_score):
            self.frontier = []
        elif self.by_score:
            least = math.log(self.min_probability) if self.min_probability > 0.0 else -math.inf
            fresh = [index for index in fresh if self.nodes[index].score >= least]
            fresh.sort(key=lambda index: -self.nodes[index].score)
            self.frontier = sorted(fresh[: self.width])
        else:
            self.frontier = fresh[: self.width]
        return bool(self.frontier)

    def draft(self) -> Draft:
        """What is proposed: the best nodes, or those born first; never a node without its parent.

        Siblings come from `draw_children`: drawn without replacement.
        """
        if not self.nodes:
            return NO_DRAFT
        order: Sequence[int] = range(len(self.nodes))
        if self.by_score and len(self.nodes) > self.max_nodes:
            order = sorted(order, key=lambda index: (-self.nodes[index].score, index))
        kept = sorted(order[: self.max_nodes])
        rows = {-1: 0} | {index: row for row, index in enumerate(kept, start=1)}
        nodes = [self.nodes[index] for index in kept]
        probs = [node.draft_probs for node in nodes if node.draft_probs is not None]
        return Draft(
            token_ids=tuple(node.token_id for node in nodes),
            parents=tuple(rows[node.parent] for node in nodes),
            draft_probs=torch.stack(probs) if len(probs) == len(nodes) else None,
            without_replacement=True,
        )
