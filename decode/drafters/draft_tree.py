"""A draft tree in the making: grown by one level with each forward of a model that drafts.

Nodes are the tokens drawn; rows are the nodes that the model itself evaluates, to draw their children. A node that is
to have none never becomes a row, so what the target accepts is at most one token longer than the rows along its path.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from decode.control.tree_plan import usual_shape
from decode.control.tree_shape import TreeShape
from decode.draft import NO_DRAFT, Draft
from decode.drafters.protocol import DraftBudget
from decode.sampling.draft_noise import DrawnChildren


@dataclass(slots=True, eq=False)
class Node:
    """A token of the tree; the root is the last committed one.

    `score` is the sum of the scores along the path, `place` its row in a given shape, `row` the one of the model's
    own forwards (None: not evaluated). `draft_probs` [vocabulary] is what it was drawn from.
    """

    token_id: int
    parent: "Node | None" = None
    depth: int = 0
    score: float = 0.0
    draft_probs: Tensor | None = None
    place: int = 0
    row: int | None = None

    def path(self) -> tuple[int, ...]:
        """Tokens from the root's child to this node."""
        token_ids: list[int] = []
        node = self
        while node.parent is not None:
            token_ids.append(node.token_id)
            node = node.parent
        return tuple(reversed(token_ids))


class Growth(Protocol):
    """Where a tree grows. `max_rows`: rows that it evaluates at most, the root included."""

    max_rows: int

    def width(self, node: Node) -> int:
        """How many children are drawn at a node that is evaluated."""
        ...

    def opened(self, nodes: Sequence[Node], drawn: Sequence[Node]) -> list[Node]:
        """Which of the nodes just drawn are evaluated next; `nodes` are all, root first, the new ones included."""
        ...

    def kept(self, nodes: Sequence[Node]) -> Sequence[Node]:
        """The nodes that are proposed, root first, parents before children, siblings in the order drawn."""
        ...


class ShapeGrowth:
    """A shape that was fixed before anything was drawn: what verification by rejection wants."""

    def __init__(self, shape: TreeShape) -> None:
        self._counts = shape.counts
        self._first_children = shape.first_children()
        self.max_rows = max(1, shape.num_parents)

    def width(self, node: Node) -> int:
        """As the shape says."""
        return self._counts[node.place]

    def opened(self, nodes: Sequence[Node], drawn: Sequence[Node]) -> list[Node]:
        """Those that have children in the shape."""
        rank, parent = 0, None
        opened: list[Node] = []
        for node in drawn:
            assert node.parent is not None
            rank = rank + 1 if node.parent is parent else 0
            parent = node.parent
            node.place = self._first_children[parent.place] + rank
            if self._counts[node.place]:
                opened.append(node)
        return opened

    def kept(self, nodes: Sequence[Node]) -> Sequence[Node]:
        """All of them."""
        return nodes


class BestFirstGrowth:
    """The `max_nodes` nodes with the best sums of scores, of a beam of `width` nodes a level (EAGLE-2: Li et al. 2024).

    Chooses by what was drawn: only where verification does not weigh the draft by its probabilities.
    """

    def __init__(self, width: int, depth: int, max_nodes: int, min_score: float = -math.inf) -> None:
        """`min_score`: a path that scores less goes on no further."""
        self._min_score = min_score
        self._width = width
        self._depth = depth
        self._max_nodes = max_nodes
        self.max_rows = 1 + width * (depth - 1)

    def width(self, node: Node) -> int:
        """The same everywhere."""
        return self._width

    def opened(self, nodes: Sequence[Node], drawn: Sequence[Node]) -> list[Node]:
        """The best of the new ones, as far as they would be kept if nothing more came."""
        if not drawn or drawn[0].depth >= self._depth:
            return []
        kept = {id(node) for node in self.kept(nodes)}
        good = [node for node in drawn if id(node) in kept and node.score >= self._min_score]
        return sorted(good, key=lambda node: -node.score)[: self._width]

    def kept(self, nodes: Sequence[Node]) -> Sequence[Node]:
        """The root and the best; a child never scores better than its parent, and comes after it among equals."""
        order = sorted(range(1, len(nodes)), key=lambda index: (-nodes[index].score, index))
        return [nodes[0], *(nodes[index] for index in sorted(order[: self._max_nodes]))]


def growth_for(budget: DraftBudget) -> Growth:
    """A chain at width 1. Else best first, unless the tokens drawn may not decide what is kept."""
    request, nodes = budget.request, max(1, budget.max_nodes)
    depth = max(1, min(budget.draft_length, nodes))
    if request.draft_width == 1:
        return ShapeGrowth(TreeShape.chain(depth))
    if request.is_weighed:
        return ShapeGrowth(usual_shape(nodes, depth, request.draft_width))
    return BestFirstGrowth(request.draft_width, depth, nodes)


def confident_growth_for(budget: DraftBudget, min_probability: float) -> Growth:
    """As `growth_for`, but a path that is less likely than `min_probability` goes on no further.

    Not where the tokens drawn may not decide what is kept.
    """
    if budget.request.is_weighed:
        return growth_for(budget)
    nodes = max(1, budget.max_nodes)
    depth = max(1, min(budget.draft_length, nodes))
    min_score = math.log(min_probability) if min_probability > 0.0 else -math.inf
    return BestFirstGrowth(budget.request.draft_width, depth, nodes, min_score)


class DraftTree:
    """One choice's tree. `open`: rows of the next forward; none when it is done. `num_written`: rows before them."""

    def __init__(self, root_id: int, growth: Growth) -> None:
        root = Node(root_id, row=0)
        self._growth = growth
        self._nodes = [root]
        self.rows = [root]
        self.open = [root]

    @property
    def max_rows(self) -> int:
        """Rows that it evaluates at most, the root included."""
        return self._growth.max_rows

    @property
    def num_written(self) -> int:
        """Rows that earlier forwards evaluated."""
        return len(self.rows) - len(self.open)

    def parents(self) -> list[int] | None:
        """The parent's row of each row; None where each is the child of the one before."""
        parents = [0 if node.parent is None else node.parent.row or 0 for node in self.rows]
        chain = all(parent == row - 1 for row, parent in enumerate(parents) if row)
        return None if chain else parents

    def widths(self) -> list[int]:
        """How many children are to be drawn at each open row."""
        return [self._growth.width(node) for node in self.open]

    def take(self, drawn: Sequence[DrawnChildren | None], num_token_ids: int) -> None:
        """The children of each open row; None: none. Only ids below `num_token_ids` are drafted."""
        new: list[Node] = []
        for node, children in zip(self.open, drawn, strict=True):
            if children is None:
                continue
            for token_id, score in zip(children.token_ids, children.scores, strict=True):
                if token_id < num_token_ids:
                    total = node.score + score
                    new.append(Node(token_id, node, node.depth + 1, total, children.draft_probs))
        self._nodes += new
        self._open(self._growth.opened(self._nodes, new))

    def draft(self) -> Draft:
        """What is proposed."""
        kept = self._growth.kept(self._nodes)
        if len(kept) < 2:
            return NO_DRAFT
        places = {id(node): place for place, node in enumerate(kept)}
        parents = tuple(places[id(node.parent)] for node in kept[1:])
        probs = [node.draft_probs for node in kept[1:] if node.draft_probs is not None]
        return Draft(
            token_ids=tuple(node.token_id for node in kept[1:]),
            parents=parents,
            draft_probs=torch.stack(probs) if probs else None,
            without_replacement=bool(probs) and len(set(parents)) < len(parents),
        )

    def path_rows(self, token_ids: Sequence[int]) -> list[int]:
        """Rows of the root and of the nodes along `token_ids`, as far as they were evaluated."""
        children = {(node.parent.row, node.token_id): node for node in self.rows if node.parent is not None}
        rows = [0]
        for token_id in token_ids:
            node = children.get((rows[-1], token_id))
            if node is None or node.row is None:
                break
            rows.append(node.row)
        return rows

    def _open(self, nodes: list[Node]) -> None:
        for node in nodes:
            node.row = len(self.rows)
            self.rows.append(node)
        self.open = nodes


class GuessedChain(DraftTree):
    """A chain whose first forward also evaluates a guess of its tokens.

    The model draws at the root and at every token of the guess at once. As long as a draw is the token guessed,
    the next draw is the one that the model would have made there, and counts; the first that is not ends the guess.
    """

    def __init__(self, root_id: int, depth: int, guess: Sequence[int]) -> None:
        """`guess`: token ids of the model; those from `depth` - 1 on are of no use and left out."""
        super().__init__(root_id, ShapeGrowth(TreeShape.chain(depth)))
        node = self.rows[0]
        guessed: list[Node] = [node]
        for token_id in guess[: depth - 1]:
            node = Node(token_id, node, node.depth + 1, place=node.place + 1, row=len(guessed))
            guessed.append(node)
        self.rows = guessed
        self.open = list(guessed)

    def take(self, drawn: Sequence[DrawnChildren | None], num_token_ids: int) -> None:
        """As of `DraftTree`; at its first call also decides how much of the guess is right."""
        right = 0
        while right + 1 < len(self.open):
            children, guessed = drawn[right], self.open[right + 1]
            if children is None or children.token_ids[:1] != (guessed.token_id,):
                break
            guessed.draft_probs = children.draft_probs
            self._nodes.append(guessed)
            right += 1
        wrong = len(self.open) - right - 1
        self.rows = self.rows[: len(self.rows) - wrong]
        self.open = [self.open[right]]
        super().take(drawn[right : right + 1], num_token_ids)
