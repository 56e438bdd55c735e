"""The shape of a draft tree: how many children each node has, whatever the tokens are."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class TreeShape:
    """`counts[i]` is the number of children of row i in level order, row 0 being the root; the last rows are leaves.

    Children are ranked: of n children a node has those of rank 0 to n - 1. Raises ValueError where the counts
    describe no tree.
    """

    counts: tuple[int, ...]

    def __post_init__(self) -> None:
        num_rows = 1
        for row, count in enumerate(self.counts):
            if row >= num_rows or count < 0:
                raise ValueError(
                    f"row {row} of {self.counts} is nobody's child, or has less than no children"
                )
            num_rows += count
        if num_rows != len(self.counts):
            raise ValueError(
                f"{self.counts} counts {num_rows - 1} nodes and describes {len(self.counts) - 1}"
            )

    @classmethod
    def chain(cls, depth: int) -> Self:
        """One child each."""
        return cls((1,) * depth + (0,))

    @property
    def num_nodes(self) -> int:
        """Rows without the root."""
        return len(self.counts) - 1

    @property
    def num_parents(self) -> int:
        """Rows that have children, the root included."""
        return sum(count > 0 for count in self.counts)

    @property
    def depth(self) -> int:
        """Of the deepest node; 0: the root alone."""
        depths = [0]
        for parent in self.parents():
            depths.append(depths[parent] + 1)
        return depths[-1]

    def parents(self) -> tuple[int, ...]:
        """The parent's row of each node, as in `Draft`."""
        return tuple(row for row, count in enumerate(self.counts) for _ in range(count))

    def first_children(self) -> tuple[int, ...]:
        """The row of each row's first child; where it has none, of the next row's."""
        return _running_totals(self.counts)


def _running_totals(counts: Sequence[int]) -> tuple[int, ...]:
    totals: list[int] = []
    total = 1
    for count in counts:
        totals.append(total)
        total += count
    return tuple(totals)
