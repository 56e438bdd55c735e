"""What the receiving end accepts: every wanted plane once, undamaged, in order; nothing else."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from decode.handoff_errors import ChecksumFailed
from decode.handoff_intake import Intake, WantedRanges
from engine.kv_cache import KvCache, KvLayout, PlaneKind
from engine.plane_codec import HandoffChecksum, crc32_of, tensor_bytes
from outrider.v1 import prefill_pb2
from prefill.planes import Span, encode_message, plan_messages

LAYOUT = KvLayout(2, 4, 4, 6, (0, 1), 4, torch.bfloat16)
VOCAB = 11
NUM_TOKENS = 10


class DictSink:
    """Keeps what is written, element by element."""

    def __init__(self) -> None:
        self.planes: dict[tuple[PlaneKind, int], Tensor] = {}
        self.num_writes = 0

    async def reserve(self, num_tokens: int) -> None:
        del num_tokens

    def write(
        self, kind: PlaneKind, layer: int, token_start: int, token_end: int, head_start: int, values: Tensor
    ) -> None:
        self.num_writes += 1
        width = (LAYOUT.hidden_dim,) if kind is PlaneKind.HIDDEN else (LAYOUT.num_kv_heads, LAYOUT.head_dim)
        plane = self.planes.setdefault((kind, layer), torch.zeros(NUM_TOKENS, *width, dtype=LAYOUT.dtype))
        if kind is PlaneKind.HIDDEN:
            plane[token_start:token_end] = values
        else:
            plane[token_start:token_end, head_start : head_start + values.shape[1]] = values


def sender() -> tuple[KvCache, Tensor]:
    """A pool with random planes of NUM_TOKENS tokens, and their slots."""
    kv = KvCache(LAYOUT, 4)
    generator = torch.Generator().manual_seed(7)
    assert kv.hidden is not None
    for planes in (kv.keys, kv.values, kv.hidden):
        planes.copy_(torch.randn(planes.shape, generator=generator))
    table = kv.open()
    kv.reserve(table, NUM_TOKENS)
    kv.commit(table, NUM_TOKENS)
    return kv, kv.slots(table, 0, NUM_TOKENS)


def messages(kv_start: int = 0, message_bytes: int = 200) -> list[prefill_pb2.Chunk]:
    kv, slots = sender()
    plan = plan_messages(LAYOUT, Span(kv_start, NUM_TOKENS), Span(kv_start, NUM_TOKENS), message_bytes)
    return [encode_message(kv, slots, planes) for planes in plan]


def commit_for(chunks: list[prefill_pb2.Chunk], num_tokens: int = NUM_TOKENS) -> prefill_pb2.Commit:
    planes = [plane for chunk in chunks for plane in chunk.planes]
    logits = tensor_bytes(torch.arange(VOCAB, dtype=torch.float32))
    checksum = HandoffChecksum()
    for plane in planes:
        checksum.add(plane.crc32)
    checksum.add(crc32_of(logits))
    return prefill_pb2.Commit(
        logits=logits,
        logits_crc32=crc32_of(logits),
        num_tokens=num_tokens,
        num_planes=len(planes),
        num_bytes=sum(len(plane.data) for plane in planes),
        checksum=checksum.value(),
    )


def intake(sink: DictSink, kv_start: int = 0) -> Intake:
    return Intake(LAYOUT, WantedRanges(NUM_TOKENS, kv_start, kv_start), VOCAB, sink)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, NUM_TOKENS - 1), st.integers(1, 2000))
def test_what_is_planned_and_encoded_arrives_whole(kv_start: int, message_bytes: int) -> None:
    kv, slots = sender()
    chunks = messages(kv_start, message_bytes)
    sink = DictSink()
    receiving = intake(sink, kv_start)
    for chunk in chunks:
        receiving.take_chunk(chunk)
    logits, checksum = receiving.take_commit(commit_for(chunks))
    assert checksum == commit_for(chunks).checksum
    assert logits.tolist() == list(range(VOCAB))
    for (kind, layer), plane in sink.planes.items():
        assert torch.equal(plane[kv_start:], kv.read_plane(kind, layer, slots)[kv_start:])
    assert len(sink.planes) == 6
    row_bytes = 4 * 4 * 2
    for chunk in chunks:
        size = sum(len(plane.data) for plane in chunk.planes)
        assert size <= max(message_bytes, row_bytes)


def test_planes_may_come_by_ranges_of_heads() -> None:
    halves: list[prefill_pb2.Chunk] = []
    for chunk in messages(message_bytes=10_000):
        for plane in chunk.planes:
            if plane.kind == prefill_pb2.PLANE_KIND_HIDDEN:
                halves.append(prefill_pb2.Chunk(planes=[plane]))
                continue
            values = torch.frombuffer(bytearray(plane.data), dtype=LAYOUT.dtype).view(-1, 4, 4)
            for head in (2, 0):
                part = prefill_pb2.Plane()
                part.CopyFrom(plane)
                part.head_start, part.head_end = head, head + 2
                part.data = tensor_bytes(values[:, head : head + 2])
                part.crc32 = crc32_of(part.data)
                halves.append(prefill_pb2.Chunk(planes=[part]))
    sink = DictSink()
    receiving = intake(sink)
    for chunk in halves:
        receiving.take_chunk(chunk)
    receiving.take_commit(commit_for(halves))
    kv, slots = sender()
    for (kind, layer), plane_values in sink.planes.items():
        assert torch.equal(plane_values, kv.read_plane(kind, layer, slots))


def set_plane(**changes: object) -> Callable[[list[prefill_pb2.Chunk]], None]:
    def change(chunks: list[prefill_pb2.Chunk]) -> None:
        for name, value in changes.items():
            setattr(chunks[0].planes[0], name, value)

    return change


def shorten(chunks: list[prefill_pb2.Chunk]) -> None:
    plane = chunks[0].planes[0]
    plane.data = plane.data[:-2]
    plane.crc32 = crc32_of(plane.data)


def flip(chunks: list[prefill_pb2.Chunk]) -> None:
    plane = chunks[1].planes[0]
    plane.data = plane.data[:-1] + bytes([plane.data[-1] ^ 0x80])


WRONG: dict[str, Callable[[list[prefill_pb2.Chunk]], object]] = {
    "a flipped bit": flip,
    "too few bytes": shorten,
    "an unknown kind": set_plane(kind=0),
    "a layer that is not there": set_plane(layer=2),
    "a negative layer": set_plane(layer=-1),
    "heads that are not there": set_plane(head_end=5),
    "no heads": set_plane(head_end=0),
    "negative heads": set_plane(head_start=-1),
    "a gap": set_plane(token_start=1),
    "no tokens": set_plane(token_end=0),
    "tokens behind the prompt": set_plane(token_end=NUM_TOKENS + 1),
    "a repeated plane": lambda chunks: chunks.insert(1, chunks[0]),
    "planes out of order": lambda chunks: chunks.insert(0, chunks.pop(1)),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_plane_is_refused_before_it_is_written(name: str) -> None:
    honest = messages(message_bytes=100)
    wrong = messages(message_bytes=100)
    WRONG[name](wrong)
    assert wrong != honest
    sink = DictSink()
    receiving = intake(sink)
    with pytest.raises(ChecksumFailed):
        for num_taken, chunk in enumerate(wrong):
            writes_before = sink.num_writes
            receiving.take_chunk(chunk)
            assert sink.num_writes == writes_before + len(chunk.planes), num_taken
    assert sink.num_writes == writes_before


@pytest.mark.parametrize(
    "changes",
    [
        {"num_tokens": NUM_TOKENS - 1},
        {"num_planes": 1},
        {"num_bytes": 0},
        {"checksum": 1},
        {"logits_crc32": 1},
        {"logits": b""},
    ],
)
def test_a_commit_that_does_not_add_up_is_refused(changes: dict[str, object]) -> None:
    chunks = messages()
    receiving = intake(DictSink())
    for chunk in chunks:
        receiving.take_chunk(chunk)
    commit = commit_for(chunks)
    for name, value in changes.items():
        setattr(commit, name, value)
    with pytest.raises(ChecksumFailed):
        receiving.take_commit(commit)


@pytest.mark.parametrize("missing", [0, 1, -1])
def test_a_commit_that_agrees_with_itself_but_not_with_what_was_wanted_is_refused(missing: int) -> None:
    chunks = messages()
    del chunks[missing]
    sink = DictSink()
    receiving = intake(sink)
    with pytest.raises(ChecksumFailed):
        for chunk in chunks:
            receiving.take_chunk(chunk)
        receiving.take_commit(commit_for(chunks))


def test_logits_of_another_vocabulary_are_refused() -> None:
    chunks = messages()
    receiving = Intake(LAYOUT, WantedRanges(NUM_TOKENS, 0, 0), VOCAB + 1, DictSink())
    for chunk in chunks:
        receiving.take_chunk(chunk)
    with pytest.raises(ChecksumFailed, match="logits"):
        receiving.take_commit(commit_for(chunks))
