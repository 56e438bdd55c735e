"""What a drafter offers that can draft a tree of any given shape."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from decode.control.tree_shape import TreeShape
from decode.draft import Draft
from decode.drafters.protocol import DraftBudget, Drafter


@runtime_checkable
class TreeDrafting(Drafter, Protocol):
    """A drafter whose children are ranked: the k-th child of a node is its k-th best, or the k-th drawn."""

    def propose_shapes(self, budgets: Sequence[DraftBudget], shapes: Sequence[TreeShape]) -> Sequence[Draft]:
        """As `propose`, in the shape given for each budget, which keeps to that budget.

        A draft may lack nodes of its shape: where a draw gave fewer children, they and all below are missing.
        """
        ...
