"""Which planes go into which message, and the messages themselves."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from engine.kv_cache import KvCache, KvLayout, PlaneKind
from engine.plane_codec import crc32_of, layout_planes, plane_row_bytes, tensor_bytes
from outrider.v1 import prefill_pb2

_WIRE_KINDS = {
    PlaneKind.KEY: prefill_pb2.PLANE_KIND_KEY,
    PlaneKind.VALUE: prefill_pb2.PLANE_KIND_VALUE,
    PlaneKind.HIDDEN: prefill_pb2.PLANE_KIND_HIDDEN,
}


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens start … end - 1."""

    start: int
    end: int

    @property
    def num_tokens(self) -> int:
        """How many they are."""
        return self.end - self.start

    def between(self, start: int, end: int) -> "Span":
        """What of it lies in start … end - 1."""
        first = min(max(self.start, start), end)
        return Span(first, max(first, min(self.end, end)))


@dataclass(frozen=True, slots=True)
class PlaneRange:
    """Tokens of one plane, all KV heads; `num_bytes` of them."""

    kind: PlaneKind
    layer: int
    tokens: Span
    num_bytes: int


def plan_messages(
    layout: KvLayout, kv: Span, hidden: Span, message_bytes: int
) -> Iterator[tuple[PlaneRange, ...]]:
    """The planes of these tokens, packed into messages of at most `message_bytes` plane bytes.

    A single token's plane is never split, so a message can be larger where one alone is.
    """
    message: list[PlaneRange] = []
    used = 0
    for plane in _plane_ranges(layout, kv, hidden, message_bytes):
        if message and used + plane.num_bytes > message_bytes:
            yield tuple(message)
            message, used = [], 0
        message.append(plane)
        used += plane.num_bytes
    if message:
        yield tuple(message)


def _plane_ranges(layout: KvLayout, kv: Span, hidden: Span, most_bytes: int) -> Iterator[PlaneRange]:
    for kind, layer in layout_planes(layout):
        tokens = hidden if kind is PlaneKind.HIDDEN else kv
        row_bytes = plane_row_bytes(layout, kind)
        num_rows = max(1, most_bytes // row_bytes)
        for start in range(tokens.start, tokens.end, num_rows):
            end = min(start + num_rows, tokens.end)
            yield PlaneRange(kind, layer, Span(start, end), (end - start) * row_bytes)


def encode_message(kv: KvCache, slots: Tensor, planes: tuple[PlaneRange, ...]) -> prefill_pb2.Chunk:
    """Copy the planes out of the pool. `slots` of the whole prompt; runs beside the engine thread.

    The caller holds the blocks, and the tokens are committed: nobody writes them now.
    """
    return prefill_pb2.Chunk(planes=[_encode(kv, slots, plane) for plane in planes])


def _encode(kv: KvCache, slots: Tensor, plane: PlaneRange) -> prefill_pb2.Plane:
    rows = slots[plane.tokens.start : plane.tokens.end].to(kv.keys.device)
    data = tensor_bytes(kv.read_plane(plane.kind, plane.layer, rows))
    return prefill_pb2.Plane(
        kind=_WIRE_KINDS[plane.kind],
        layer=plane.layer,
        head_start=0,
        head_end=0 if plane.kind is PlaneKind.HIDDEN else kv.layout.num_kv_heads,
        token_start=plane.tokens.start,
        token_end=plane.tokens.end,
        data=data,
        crc32=crc32_of(data),
    )
