"""How many nodes the drafts of one kind have at each depth."""

from collections.abc import Sequence
from itertools import chain, repeat

_FEWEST = 0.001
"""A depth that is hardly ever reached costs next to nothing, but is not free."""


class NodeCounts:
    """Decayed mean of the nodes at depth 1, 2, …, over the drafts that were asked for to that depth or deeper.

    A draft that ends sooner, or has fewer children than its width allows, counts with what it has. `width` stands for
    the first `prior_drafts` drafts at depth 1; what a depth lacks of so many takes the mean of the depth before.
    """

    __slots__ = ("_decay", "_means", "_nodes", "_prior_drafts", "_weights")

    def __init__(
        self, max_depth: int, width: int, *, decay: float = 0.995, prior_drafts: float = 4.0
    ) -> None:
        self._decay = decay
        self._prior_drafts = prior_drafts
        self._weights = [0.0] * max_depth
        self._nodes = [0.0] * max_depth
        if max_depth:
            self._weights[0], self._nodes[0] = prior_drafts, prior_drafts * width
        self._means: tuple[float, ...] | None = None

    @property
    def means(self) -> tuple[float, ...]:
        """Nodes at depth 1, 2, …, max_depth; each above 0."""
        if self._means is None:
            self._means = self._estimate()
        return self._means

    def observe(self, asked_depth: int, nodes: Sequence[int]) -> None:
        """One draft that was asked for to `asked_depth` and has `nodes[i]` nodes at depth i + 1, none beyond."""
        counts = chain(nodes, repeat(0))
        for depth, count in zip(range(min(asked_depth, len(self._weights))), counts, strict=False):
            self._weights[depth] = self._decay * self._weights[depth] + 1.0
            self._nodes[depth] = self._decay * self._nodes[depth] + count
        self._means = None

    def _estimate(self) -> tuple[float, ...]:
        means: list[float] = []
        for weight, nodes in zip(self._weights, self._nodes, strict=True):
            missing = max(0.0, self._prior_drafts - weight) if means else 0.0
            before = means[-1] if means else 0.0
            means.append(max(_FEWEST, (nodes + missing * before) / (weight + missing)))
        return tuple(means)
