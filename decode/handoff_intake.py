"""The receiving end of one hand-off, without the network: checks every plane, then hands it to the sink."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from decode.handoff_errors import ChecksumFailed
from engine.kv_layout import KvLayout, PlaneKind
from engine.plane_codec import HandoffChecksum, bytes_tensor, crc32_of, plane_layers, plane_row_shape
from outrider.v1 import prefill_pb2

_KINDS = {int(kind): kind for kind in PlaneKind}


class HandoffSink(Protocol):
    """Where a hand-off's planes go. Nothing written is visible to decoding before `fetch` has returned."""

    async def reserve(self, num_tokens: int) -> None:
        """Make room for `num_tokens` table indices. Called once, on the event loop, when planes are coming.

        It may wait; raise to give the hand-off up.
        """
        ...

    def write(
        self,
        kind: PlaneKind,
        layer: int,
        token_start: int,
        token_end: int,
        head_start: int,
        values: Tensor,
    ) -> None:
        """Store rows of tokens token_start … token_end - 1, checked already.

        values: Tensor  # [tokens, heads, head_dim] from KV head `head_start` on; hidden: [tokens, hidden_dim]
        Called on a transfer thread, one call at a time within a fetch; not after `fetch` has ended.
        """
        ...


@dataclass(frozen=True, slots=True)
class WantedRanges:
    """What was asked for: K and V of tokens kv_start …, hidden planes of hidden_start …, up to num_tokens - 1."""

    num_tokens: int
    kv_start: int
    hidden_start: int

    def start(self, kind: PlaneKind) -> int:
        """The first token wanted of a kind."""
        return self.hidden_start if kind is PlaneKind.HIDDEN else self.kv_start


class Intake:
    """Takes chunks in order and follows what has come, so that the commit can be held against it.

    Planes of one (kind, layer, KV head) must come in token order, without gaps and without repeats.
    Every method raises ChecksumFailed on bytes that are damaged or not asked for.
    """

    def __init__(self, layout: KvLayout, wanted: WantedRanges, vocab_size: int, sink: HandoffSink) -> None:
        self._layout = layout
        self.wanted = wanted
        self._vocab_size = vocab_size
        self._sink = sink
        self._checksum = HandoffChecksum()
        self._num_planes = 0
        self.num_bytes = 0
        self._next_token = {
            (kind, layer): np.full(
                1 if kind is PlaneKind.HIDDEN else layout.num_kv_heads, wanted.start(kind), dtype=np.int64
            )
            for kind in PlaneKind
            for layer in plane_layers(layout, kind)
        }

    def take_chunk(self, chunk: prefill_pb2.Chunk) -> int:
        """Check and store a chunk's planes; the bytes to give credit for."""
        num_bytes = 0
        for plane in chunk.planes:
            self._take_plane(plane)
            num_bytes += len(plane.data)
        self.num_bytes += num_bytes
        return num_bytes

    def take_commit(self, commit: prefill_pb2.Commit) -> tuple[Tensor, int]:
        """The logits row and the checksum to acknowledge, once all that was wanted has come undamaged."""
        if crc32_of(commit.logits) != commit.logits_crc32:
            raise ChecksumFailed("the logits arrived damaged")
        self._checksum.add(commit.logits_crc32)
        counted = (self.wanted.num_tokens, self._num_planes, self.num_bytes, self._checksum.value())
        claimed = (commit.num_tokens, commit.num_planes, commit.num_bytes, commit.checksum)
        if counted != claimed:
            raise ChecksumFailed(f"tokens, planes, bytes, checksum are {counted}, the commit says {claimed}")
        for (kind, layer), next_token in self._next_token.items():
            if (next_token != self.wanted.num_tokens).any():
                raise ChecksumFailed(f"{kind.name} of layer {layer} did not come whole")
        try:
            logits = bytes_tensor(commit.logits, torch.float32, (self._vocab_size,))
        except ValueError as error:
            raise ChecksumFailed(f"logits: {error}") from error
        return logits, commit.checksum

    @property
    def num_blocks(self) -> int:
        """Blocks that the wanted K and V belong to."""
        first = self.wanted.kv_start // self._layout.block_size
        return self._layout.blocks_for(self.wanted.num_tokens) - first

    def _take_plane(self, plane: prefill_pb2.Plane) -> None:
        kind = _KINDS.get(plane.kind)
        next_token = None if kind is None else self._next_token.get((kind, plane.layer))
        if kind is None or next_token is None:
            raise ChecksumFailed(f"a plane of kind {plane.kind}, layer {plane.layer} was not asked for")
        heads = slice(0, 1) if kind is PlaneKind.HIDDEN else slice(plane.head_start, plane.head_end)
        if kind is not PlaneKind.HIDDEN and not 0 <= plane.head_start < plane.head_end <= len(next_token):
            raise ChecksumFailed(f"KV heads {plane.head_start}..{plane.head_end} of {len(next_token)}")
        in_order = (next_token[heads] == plane.token_start).all()
        if not in_order or not plane.token_start < plane.token_end <= self.wanted.num_tokens:
            raise ChecksumFailed(
                f"{kind.name} of layer {plane.layer}: tokens {plane.token_start}..{plane.token_end} "
                f"come where {next_token[heads].tolist()} were next"
            )
        if crc32_of(plane.data) != plane.crc32:
            raise ChecksumFailed(f"{kind.name} of layer {plane.layer} arrived damaged")
        row = plane_row_shape(self._layout, kind, plane.head_end - plane.head_start)
        try:
            shape = (plane.token_end - plane.token_start, *row)
            values = bytes_tensor(plane.data, self._layout.dtype, shape)
        except ValueError as error:
            raise ChecksumFailed(f"{kind.name} of layer {plane.layer}: {error}") from error
        self._checksum.add(plane.crc32)
        self._num_planes += 1
        self._sink.write(kind, plane.layer, plane.token_start, plane.token_end, plane.head_start, values)
        next_token[heads] = plane.token_end
