"""Planes as bytes, and the checksum over a hand-off. Used at both ends of a Fetch stream."""

import hashlib
import zlib
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from engine.kv_layout import KvLayout, PlaneKind


class HandoffChecksum:
    """Over the crc32 of every plane in the order sent, then that of the logits: 64 bits of BLAKE2b."""

    def __init__(self) -> None:
        self._state = hashlib.blake2b(digest_size=8)

    def add(self, crc32: int) -> None:
        """The next part's crc32."""
        self._state.update(crc32.to_bytes(4, "little"))

    def value(self) -> int:
        """Over what was added so far."""
        return int.from_bytes(self._state.digest(), "little")


def checksum_of(crc32s: list[int]) -> int:
    """`HandoffChecksum` over a whole list."""
    checksum = HandoffChecksum()
    for crc32 in crc32s:
        checksum.add(crc32)
    return checksum.value()


def crc32_of(data: bytes) -> int:
    """The crc32 of a part, as zlib has it."""
    return zlib.crc32(data)


def tensor_bytes(values: Tensor) -> bytes:
    """Row-major little-endian bytes of a tensor on any device."""
    flat = values.detach().cpu().contiguous().flatten()
    return flat.view(torch.uint8).numpy().tobytes()


def bytes_tensor(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """The inverse of `tensor_bytes`; a copy. Raises ValueError where the size is wrong."""
    if len(data) != int(np.prod(shape)) * dtype.itemsize:
        raise ValueError(f"{len(data)} bytes for {shape} of {dtype}")
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape)


def plane_row_shape(layout: KvLayout, kind: PlaneKind, num_heads: int) -> tuple[int, ...]:
    """What one token takes in a plane."""
    return (layout.hidden_dim,) if kind is PlaneKind.HIDDEN else (num_heads, layout.head_dim)


def plane_row_bytes(layout: KvLayout, kind: PlaneKind) -> int:
    """Bytes that one token takes in a whole plane."""
    width = layout.hidden_dim if kind is PlaneKind.HIDDEN else layout.num_kv_heads * layout.head_dim
    return width * layout.dtype.itemsize


def plane_layers(layout: KvLayout, kind: PlaneKind) -> tuple[int, ...]:
    """The layers that have a plane of this kind."""
    return layout.hidden_layers if kind is PlaneKind.HIDDEN else tuple(range(layout.num_layers))


def layout_planes(layout: KvLayout) -> Iterator[tuple[PlaneKind, int]]:
    """Every (kind, layer) that is kept, in the order in which planes are sent."""
    for kind in PlaneKind:
        for layer in plane_layers(layout, kind):
            yield kind, layer
