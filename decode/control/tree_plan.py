"""The best draft tree for measured acceptance and measured times (Sequoia: Chen et al. 2024).

Let a_k be the probability that the k-th child of a node is the target's token, given that its earlier siblings were
not. Then the k-th child is reached from its parent with p_k = a_k · Π_{j<k} (1 - a_j), a node with the product of
those along its path, and a step emits 1 + Σ_nodes P(node reached) tokens in expectation.

The best tree is found by dynamic programming. With B(l, d, m) the most that m nodes in at most d levels add below a
node of level l that was reached,

    B(l, d, m) = max over the shares m_0 + m_1 + … ≤ m, m_k ≥ 1, of  Σ_k p_k(l + 1) · (1 + B(l + 1, d - 1, m_k - 1)),

the shares being given out rank by rank, as in a knapsack. Cost: ranks · nodes² for each level and depth.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from decode.control.tree_shape import TreeShape

Float64 = NDArray[np.float64]
RankRates = Sequence[float]

USUAL_RANK_RATES: tuple[float, ...] = (0.6, 0.3, 0.2, 0.15, 0.12, 0.1, 0.08, 0.06)
"""Assumed where nothing was measured."""


@dataclass(frozen=True, slots=True)
class TreeCosts:
    """Measured seconds: of a target step by its rows, of a draft by its depth (0 for depth 0).

    `batch`: choices that draft the same tree in one step, so that rows = batch · (nodes + 1).
    """

    step_seconds: Callable[[int], float]
    draft_seconds: Callable[[int], float]
    batch: int = 1


@dataclass(frozen=True, slots=True)
class PlannedTree:
    """A tree and what is expected of it: tokens emitted a step, the token of the target's own draw included.

    `seconds` is of one step with its draft; 0.0 where nothing was measured.
    """

    shape: TreeShape
    expected_tokens: float
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Of one choice. Without measured times all steps count as equally long."""
        return _speed((self.expected_tokens, self.seconds, 0, 0))


@dataclass(frozen=True, slots=True)
class _Best:
    """`added[m]` is B of the module's docstring; `shares[k, m]`: nodes of rank k's subtree when m are left."""

    added: Float64
    shares: NDArray[np.int64]


class TreePlan:
    """The best shape for every number of nodes ≤ `max_nodes` and every depth ≤ `max_depth`.

    `rank_rates[i][k]` is the conditional rate a_k at depth i + 1; the last row holds for all deeper ones. No node
    gets more children than there are rates. Raises ValueError for rates outside [0, 1].
    """

    def __init__(self, rank_rates: Sequence[RankRates], max_nodes: int, max_depth: int) -> None:
        if not rank_rates:
            raise ValueError("rank rates of one depth at least are needed")
        self.max_nodes = max_nodes
        self.max_depth = max_depth
        self._reach = [_reach(rates) for rates in rank_rates]
        self._solved: dict[tuple[int, int], _Best] = {}
        sizes = np.arange(max_nodes + 1)
        self._left = sizes[:, None] - sizes[None, :]

    def expected_tokens(self, nodes: int, depth: int) -> float:
        """Tokens that a step emits with the best tree of at most `nodes` nodes and `depth` levels."""
        return 1.0 + float(self._solve(0, min(depth, self.max_depth)).added[min(nodes, self.max_nodes)])

    def shape(self, nodes: int, depth: int) -> TreeShape:
        """The best tree of at most `nodes` nodes and `depth` levels."""
        counts: list[int] = []
        waiting = deque([(0, min(depth, self.max_depth), min(nodes, self.max_nodes))])
        while waiting:
            level, levels_left, below = waiting.popleft()
            shares = self._shares(level, levels_left, below)
            counts.append(len(shares))
            waiting.extend((level + 1, levels_left - 1, share - 1) for share in shares)
        return TreeShape(tuple(counts))

    def best_for(self, nodes: int, depth: int, costs: TreeCosts) -> PlannedTree:
        """The fastest tree of exactly this budget of nodes and at most `depth` levels."""
        return self._planned(*self._fastest(nodes, depth, costs))

    def best(self, nodes: int, depth: int, costs: TreeCosts, *, fewest: int = 0) -> PlannedTree:
        """The tree that emits most tokens a second, of `fewest` to `nodes` nodes and at most `depth` levels.

        Among equals the smallest.
        """
        sizes = range(min(fewest, nodes), min(nodes, self.max_nodes) + 1)
        return self._planned(*max((self._fastest(size, depth, costs) for size in sizes), key=_speed))

    def _fastest(self, nodes: int, depth: int, costs: TreeCosts) -> tuple[float, float, int, int]:
        """(expected tokens, seconds, nodes, levels) of the number of levels that pays best."""
        step_seconds = costs.step_seconds(costs.batch * (1 + nodes))
        levels = range(min(1, nodes, depth), min(depth, self.max_depth) + 1)
        return max(
            (
                (self.expected_tokens(nodes, level), step_seconds + costs.draft_seconds(level), nodes, level)
                for level in levels
            ),
            key=_speed,
        )

    def _planned(self, expected: float, seconds: float, nodes: int, depth: int) -> PlannedTree:
        return PlannedTree(self.shape(nodes, depth), expected, seconds)

    def _solve(self, level: int, depth: int) -> _Best:
        """B for a node of `level` above `depth` more levels, for every number of nodes."""
        key = min(level, len(self._reach) - 1), depth
        solved = self._solved.get(key)
        if solved is None:
            solved = self._solved[key] = self._solve_level(level, depth)
        return solved

    def _solve_level(self, level: int, depth: int) -> _Best:
        size = self.max_nodes + 1
        reach = self._reach[min(level, len(self._reach) - 1)]
        shares = np.zeros((len(reach), size), dtype=np.int64)
        added = np.zeros(size)
        if depth == 0:
            return _Best(added, shares)
        subtree = np.concatenate([[0.0], 1.0 + self._solve(level + 1, depth - 1).added[:-1]])
        rows = np.arange(size)
        for rank in reversed(range(len(reach))):
            values = np.where(self._left >= 0, reach[rank] * subtree + added[self._left], -np.inf)
            values[:, 0] = 0.0
            shares[rank] = values.argmax(axis=1)
            added = values[rows, shares[rank]]
        return _Best(added, shares)

    def _shares(self, level: int, depth: int, below: int) -> list[int]:
        """Sizes of the subtrees of a node's children, by rank."""
        solved = self._solve(level, depth)
        shares: list[int] = []
        for rank in range(len(solved.shares)):
            share = int(solved.shares[rank, below])
            if share == 0:
                break
            shares.append(share)
            below -= share
        return shares


def expected_tokens_of(shape: TreeShape, rank_rates: Sequence[RankRates]) -> float:
    """Tokens that a step emits in expectation with this tree; rates as in `TreePlan`."""
    reach = [_reach(rates) for rates in rank_rates]
    chances, depths = [1.0], [0]
    siblings: dict[int, int] = {}
    for parent in shape.parents():
        rank = siblings.get(parent, 0)
        siblings[parent] = rank + 1
        level = reach[min(depths[parent], len(reach) - 1)]
        chances.append(chances[parent] * (float(level[rank]) if rank < len(level) else 0.0))
        depths.append(depths[parent] + 1)
    return sum(chances)


def _speed(tree: tuple[float, float, int, int]) -> float:
    """Tokens a second of (expected tokens, seconds, nodes, levels)."""
    return tree[0] / tree[1] if tree[1] > 0.0 else tree[0]


@lru_cache(maxsize=256)
def usual_shape(nodes: int, depth: int, width: int) -> TreeShape:
    """A good tree where nothing was measured: depends on its arguments alone."""
    return TreePlan([USUAL_RANK_RATES[:width]], nodes, depth).shape(nodes, depth)


def _reach(rates: RankRates) -> Float64:
    """p_k of the module's docstring."""
    conditional: NDArray[Any] = np.asarray(rates, dtype=np.float64)
    if (
        conditional.ndim != 1
        or not conditional.size
        or not bool(((conditional >= 0) & (conditional <= 1)).all())
    ):
        raise ValueError(f"rank rates must be in [0, 1], at least one at each depth: {rates}")
    reach: Float64 = conditional * np.concatenate([[1.0], np.cumprod(1.0 - conditional[:-1])])
    return reach
