"""Attention over paged K and V, behind one Protocol."""

from typing import Protocol

from torch import Tensor

from engine.step_rows import StepRows


class Attention(Protocol):
    """Rotates Q and K, writes K and V to their slots, and attends; exact (DESIGN: exact numbers).

    `name` with its version is part of the numerics class. The engine thread calls `begin` once a step,
    then `attend` once a layer, in layer order.
    """

    name: str

    def begin(self, rows: StepRows) -> None:
        """Take the index arrays of the step."""

    def attend(self, layer: int, qkv: Tensor) -> Tensor:
        """qkv [rows, query_dim + 2 · kv_dim], which may be overwritten → [rows, query_dim]."""
