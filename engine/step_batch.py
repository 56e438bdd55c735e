"""What one target forward is asked, and what it answers.

Rows of one sequence form a tree. Row 0 is the root: the last committed token, whose K and V are not
computed yet. Row i > 0 has the parent row `parents[i] < i`. A chunk of a prompt is a chain.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from engine.block_table import BlockTable

LogitRows = Literal["all", "last", "none"]


@dataclass(frozen=True, slots=True)
class SequenceStep:
    """The rows of one sequence in a step.

    `start` is the absolute position of row 0; K and V of positions < start are in `table`. Row i has
    position start + depth(i). Row i writes its K, V and hidden planes to the slot of table index
    start + i: for a chain that is its final place; a tree's accepted path is compacted afterwards
    (`KvCache.compact`). The caller has reserved start + len(token_ids) slots. `parents` None: a chain.
    `num_auxiliary` rows at the end are evaluated for a drafter, and never verified, committed or hashed.
    The first `num_written` rows were evaluated by earlier steps with the same start: K and V lie in their slots,
    they are neither evaluated again nor have they logits. So a drafter grows a tree level by level.
    """

    table: BlockTable
    start: int
    token_ids: Sequence[int]
    parents: Sequence[int] | None = None
    logit_rows: LogitRows = "all"
    num_auxiliary: int = 0
    num_written: int = 0

    @property
    def num_rows(self) -> int:
        """Rows that the step evaluates."""
        return len(self.token_ids) - self.num_written


@dataclass(frozen=True, slots=True)
class StepResult:
    """Logits of the wanted rows, sequence after sequence.

    logits: Tensor  # [wanted rows, vocabulary] float32, before any processing
    logits_start: first logits row of each sequence (its count follows from `logit_rows`)
    last_hidden: Tensor | None  # [rows, hidden_dim], final-normed, when asked for
    """

    logits: Tensor
    logits_start: tuple[int, ...]
    last_hidden: Tensor | None = None
