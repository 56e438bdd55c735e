"""The hand-off over a real socket gives the planes and logits that a colocated prefill gives."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import grpc
import pytest
import torch
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from core.telemetry import tracer
from core.telemetry_names import (
    HANDOFF_OUTCOME,
    HANDOFF_SIZE,
    HANDOFF_TRANSPORT,
    SPAN_FETCH,
    SPAN_HANDOFF,
    SPAN_PREFILL,
)
from decode.handoff import PeerRefused
from engine.block_table import BlockTable
from engine.kv_cache import KvCache
from outrider.v1 import prefill_pb2, prefill_pb2_grpc
from tests.support.handoff_rig import HANDOFF, Rig, handoff_rig
from tests.support.toy_engine import HIDDEN_LAYERS, ToyEngine, toy_logits, toy_planes, toy_states

BLOCK_SIZE = 4


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    engine = ToyEngine(hidden_layers=HIDDEN_LAYERS, block_size=BLOCK_SIZE)
    async with handoff_rig(engine, KvCache(engine.kv.layout, 64)) as rig:
        yield rig


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    """Spans of this process; the provider is global and can be set only once, so its processor is added to it."""
    provider = trace.get_tracer_provider()
    if not isinstance(provider, TracerProvider):
        provider = TracerProvider()
        trace.set_tracer_provider(provider)
    exporter = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield exporter
    exporter.shutdown()


def toy(rig: Rig) -> ToyEngine:
    assert isinstance(rig.engine, ToyEngine)
    return rig.engine


def prompt(num_tokens: int, start: int = 0) -> list[int]:
    return [(start + 7 * index) % 90 for index in range(num_tokens)]


def assert_planes(kv: KvCache, table: BlockTable, token_ids: list[int], start: int = 0) -> None:
    states = toy_states(token_ids)[start:]
    slots = kv.slots(table, start, len(token_ids))
    for (kind, layer), values in toy_planes(kv.layout, states).items():
        assert torch.equal(kv.read_plane(kind, layer, slots), values)


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 8, 40, 41])
async def test_fetched_planes_and_logits_are_those_of_a_colocated_prefill(rig: Rig, num_tokens: int) -> None:
    token_ids = prompt(num_tokens)
    table, result = await rig.fetch(token_ids)
    assert_planes(rig.receiver, table, token_ids)
    assert torch.equal(result.logits, toy_logits(toy_states(token_ids)[-1]))
    assert result.bytes == num_tokens * (
        rig.receiver.layout.kv_token_bytes + rig.receiver.layout.hidden_token_bytes
    )
    assert result.blocks == -(-num_tokens // BLOCK_SIZE)
    await rig.idle()


@pytest.mark.parametrize("kv_start", [1, 3, 4, 5, 15, 16, 20])
async def test_only_what_is_missing_is_sent_also_from_inside_a_block(rig: Rig, kv_start: int) -> None:
    token_ids = prompt(21)
    table, result = await rig.fetch(token_ids, kv_start)
    assert_planes(rig.receiver, table, token_ids, kv_start)
    layout = rig.receiver.layout
    assert result.bytes == (21 - kv_start) * (layout.kv_token_bytes + layout.hidden_token_bytes)
    assert result.blocks == 6 - kv_start // BLOCK_SIZE
    await rig.idle()


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 16, 17])
async def test_a_repeated_prompt_computes_one_token_and_sends_the_same_planes(
    rig: Rig, num_tokens: int
) -> None:
    engine = toy(rig)
    token_ids = prompt(num_tokens)
    await rig.fetch(token_ids)
    await rig.idle()
    rows_before = engine.num_rows
    table, result = await rig.fetch(token_ids)
    assert_planes(rig.receiver, table, token_ids)
    assert torch.equal(result.logits, toy_logits(toy_states(token_ids)[-1]))
    last_block = 1 if num_tokens % BLOCK_SIZE == 0 else num_tokens % BLOCK_SIZE
    assert engine.num_rows - rows_before == last_block
    assert result.cached_tokens == num_tokens - last_block
    await rig.idle()


async def test_prompts_with_a_common_prefix_share_its_blocks_and_differ_behind_it(rig: Rig) -> None:
    common = prompt(18)
    first, second = [*common, 1, 2, 3], [*common, 4, 5, 6]
    tables = await asyncio.gather(rig.fetch(first), rig.fetch(second))
    for (table, result), token_ids in zip(tables, (first, second), strict=True):
        assert_planes(rig.receiver, table, token_ids)
        assert torch.equal(result.logits, toy_logits(toy_states(token_ids)[-1]))
    _, third = await rig.fetch([*common, 7])
    assert third.cached_tokens == 16
    await rig.idle()


async def test_another_salt_finds_nothing_in_the_prefix_cache(rig: Rig) -> None:
    token_ids = prompt(21)
    await rig.fetch(token_ids)
    async with rig.raw_stream(token_ids, cache_salt=b"another tenant") as call:
        message = await call.read()
        assert isinstance(message, prefill_pb2.FetchDown)
        assert message.announce.cached_tokens == 0


async def test_many_prompts_at_once_in_a_small_pool_all_come_right(rig: Rig) -> None:
    prompts = [prompt(5 + 7 * (index % 9), start=index) for index in range(24)]
    assert sum(rig.receiver.layout.blocks_for(len(token_ids)) for token_ids in prompts) > 64
    receiver = KvCache(rig.receiver.layout, 256)
    rig.receiver = receiver
    results = await asyncio.gather(*(rig.fetch(token_ids) for token_ids in prompts))
    for (table, result), token_ids in zip(results, prompts, strict=True):
        assert_planes(receiver, table, token_ids)
        assert torch.equal(result.logits, toy_logits(toy_states(token_ids)[-1]))
    await rig.idle()


async def test_no_message_carries_more_plane_bytes_than_the_limit_and_credit_allow(rig: Rig) -> None:
    token_ids = prompt(200)
    credit_bytes = 6000
    async with rig.raw_stream(token_ids, credit_bytes=credit_bytes) as call:
        outstanding, largest, total = 0, 0, 0
        while True:
            message = await call.read()
            assert isinstance(message, prefill_pb2.FetchDown)
            if message.WhichOneof("message") == "commit":
                break
            size = sum(len(plane.data) for plane in message.chunk.planes)
            outstanding, largest, total = outstanding + size, max(largest, size), total + size
            assert outstanding <= credit_bytes
            if outstanding + HANDOFF.chunk_bytes > credit_bytes:
                await call.write(prefill_pb2.FetchUp(credit=prefill_pb2.Credit(bytes=outstanding)))
                outstanding = 0
        assert largest <= HANDOFF.chunk_bytes
        assert total == message.commit.num_bytes > 5 * credit_bytes
        checksum = message.commit.checksum
        await call.write(prefill_pb2.FetchUp(acknowledge=prefill_pb2.Acknowledge(checksum=checksum)))
        assert await call.code() is grpc.StatusCode.OK
    await rig.idle()


async def test_an_opening_message_above_the_limit_is_refused_and_the_channel_goes_on(rig: Rig) -> None:
    too_large = rig.open([80] * (9 * 2**20))
    unlimited_sender = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(rig.peer.address, options=unlimited_sender) as channel:
        stub = prefill_pb2_grpc.PrefillStub(channel)
        call = stub.Fetch()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.write(prefill_pb2.FetchUp(open=too_large))
            await call.read()
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        reply = await stub.Handshake(prefill_pb2.HandshakeRequest(peer=rig.ours))
        assert reply.peer.worker_id == "prefill-0"
    await rig.idle()


async def test_a_prompt_too_long_for_one_message_is_refused_before_it_is_sent(rig: Rig) -> None:
    with pytest.raises(PeerRefused, match="9437184 tokens") as refused:
        await rig.fetch([80] * (9 * 2**20))
    assert refused.value.error.field == "token_ids"
    await rig.fetch(prompt(9))
    await rig.idle()


async def test_a_prompt_of_megabytes_is_read_and_refused_with_its_size(rig: Rig) -> None:
    for num_tokens in (3_900_000, 4_100_000, 5_000_000):
        with pytest.raises(PeerRefused, match=f"{num_tokens} tokens") as refused:
            await rig.fetch([80] * num_tokens)
        assert refused.value.error.field == "token_ids"
    await rig.fetch(prompt(9))
    await rig.idle()


async def test_a_span_of_each_side_joins_the_callers_trace(rig: Rig, spans: InMemorySpanExporter) -> None:
    with tracer().start_as_current_span("caller") as caller:
        await rig.fetch(prompt(9))
    await rig.idle()
    by_name = {span.name: span for span in spans.get_finished_spans()}
    for name, parent in ((SPAN_PREFILL, SPAN_FETCH), (SPAN_HANDOFF, SPAN_PREFILL)):
        parent_context = by_name[name].parent
        assert parent_context is not None
        assert parent_context.span_id == by_name[parent].context.span_id
    for name in (SPAN_FETCH, SPAN_HANDOFF):
        assert by_name[name].context.trace_id == caller.get_span_context().trace_id
        attributes = dict(by_name[name].attributes or {})
        assert (attributes[HANDOFF_OUTCOME], attributes[HANDOFF_TRANSPORT]) == ("ok", "grpc")
        assert int(str(attributes[HANDOFF_SIZE])) > 0
