"""The shape of the paged KV store, and how its blocks are counted."""

from dataclasses import dataclass
from enum import IntEnum

import torch


class PlaneKind(IntEnum):
    """What a plane holds; the values are those of the wire's `PlaneKind`."""

    KEY = 1
    VALUE = 2
    HIDDEN = 3


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Shape and dtype of K, V and hidden planes. `hidden_layers`: layers whose output is kept, ascending."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    hidden_dim: int
    hidden_layers: tuple[int, ...]
    block_size: int
    dtype: torch.dtype

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of K and V that one token takes over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def hidden_token_bytes(self) -> int:
        """Bytes of hidden planes that one token takes."""
        return len(self.hidden_layers) * self.hidden_dim * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class KvStats:
    """Blocks by state: total = free + used + cached."""

    total: int
    free: int
    used: int
    cached: int


class OutOfBlocks(Exception):
    """The pool cannot give `needed` blocks; `free` counts those it could give, cached ones included."""

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(f"{needed} KV blocks needed, {free} can be had")
        self.needed = needed
        self.free = free


class InvariantBroken(AssertionError):
    """Our own bookkeeping of blocks contradicts itself."""
