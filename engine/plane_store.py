"""The memory of one kind of plane, and copies of its slots.

On the CPU the copies go through numpy views of whole words: torch would open a thread pool of its own on
every thread that copies beside the engine's, and takes ten times as long for the few slots of a step.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

Words = np.ndarray[Any, np.dtype[Any]]
Slots = np.ndarray[Any, np.dtype[np.int32]]
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class PlaneStore:
    """planes: Tensor  # [layers, slots, ...row]; memory that was never written is never touched."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None) -> None:
        self.planes = torch.empty(shape, dtype=dtype, device=device)
        self._words: Words | None = None
        if self.planes.device.type == "cpu":
            self._words = _as_words(self.planes)

    def read(self, layer: int, slots: Tensor, heads: tuple[int, int] | None = None) -> Tensor:
        """A copy of rows: Tensor  # [slots, ...row], of the heads start … end - 1 only where given."""
        if self._words is None:
            rows = self.planes[layer].index_select(0, slots)
            return rows if heads is None else rows[:, heads[0] : heads[1]]
        words = self._words[layer]
        if heads is None:
            picked = words.take(slots.numpy(), axis=0)
        else:
            picked = words[:, heads[0] : heads[1]][slots.numpy()]
        rows = self.planes.new_empty((*picked.shape[:-1], self.planes.shape[-1]))
        _as_words(rows)[...] = picked
        return rows

    def write(self, layer: int, slots: Tensor, rows: Tensor, head_start: int | None = None) -> None:
        """Write `rows` (as `read`) to slots, from head `head_start` on where given."""
        plane = self.planes[layer]
        if head_start is not None:
            plane = plane[:, head_start : head_start + rows.shape[1]]
        if plane.shape[1:] != rows.shape[1:] or rows.dtype != plane.dtype:
            raise ValueError(
                f"rows {tuple(rows.shape)} {rows.dtype} do not fit {tuple(plane.shape)} {plane.dtype}"
            )
        if self._words is None:
            plane.index_copy_(0, slots.long(), rows)
            return
        words = self._words[layer]
        if head_start is not None:
            words = words[:, head_start : head_start + rows.shape[1]]
        words[slots.numpy()] = _as_words(rows.contiguous())

    def copy(self, source: Slots, target: Slots) -> None:
        """Copy slots to slots in every layer; all are read before one is written."""
        if self._words is None:
            device = self.planes.device
            picked = self.planes.index_select(1, torch.from_numpy(source).to(device))
            self.planes.index_copy_(1, torch.from_numpy(target).long().to(device), picked)
        else:
            self._words[:, target] = self._words.take(source, axis=1)


def _as_words(tensor: Tensor) -> Words:
    """The same memory as integers, as wide as a row's length allows."""
    row_bytes = tensor.shape[-1] * tensor.element_size()
    word = next(word for word in _WORDS if row_bytes % word.itemsize == 0)
    words: Words = tensor.view(word).numpy()
    return words
