"""A hand-off rig over the toy engine, and what fault tests do with its streams."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest
import torch

from core.clock import FakeClock
from core.settings import HandoffSettings, PrefillSettings
from engine.kv_cache import KvCache
from outrider.v1 import prefill_pb2
from tests.support.handoff_rig import Rig, handoff_rig
from tests.support.toy_engine import StepGate, ToyEngine, toy_logits, toy_states

BLOCK_SIZE = 4
QUICK = HandoffSettings(credit_bytes=2**16, chunk_bytes=2**12, progress_timeout_s=0.3, queue_timeout_s=5.0)
FetchCall = grpc.aio.StreamStreamCall[prefill_pb2.FetchUp, prefill_pb2.FetchDown]
PATIENT = HandoffSettings(credit_bytes=2**16, chunk_bytes=2**12, progress_timeout_s=30.0)


@asynccontextmanager
async def toy_rig(
    *,
    num_blocks: int = 64,
    handoff: HandoffSettings = PATIENT,
    client_handoff: HandoffSettings | None = None,
    gate: StepGate | None = None,
    clock: FakeClock | None = None,
) -> AsyncIterator[tuple[Rig, ToyEngine]]:
    engine = ToyEngine(num_blocks=num_blocks, block_size=BLOCK_SIZE)
    if gate is not None:
        engine.before_step = gate
    receiver = KvCache(engine.kv.layout, 512)
    prefill_settings = PrefillSettings(chunk_tokens=16)
    async with handoff_rig(
        engine,
        receiver,
        handoff=handoff,
        prefill=prefill_settings,
        client_handoff=client_handoff,
        clock=clock,
    ) as rig:
        try:
            yield rig, engine
        finally:
            if gate is not None:
                gate.open()


def prompt(num_tokens: int, start: int = 0) -> list[int]:
    return [(start + 7 * index) % 90 for index in range(num_tokens)]


async def entered(gate: StepGate) -> None:
    """Until the engine thread stands in a step."""
    assert await asyncio.to_thread(gate.entered.acquire, timeout=10)


async def assert_serves(rig: Rig, token_ids: list[int]) -> None:
    """A probe: a request after the fault gets the right answer, and then nothing is held."""
    _, result = await asyncio.wait_for(rig.fetch(token_ids), 10)
    assert torch.equal(result.logits, toy_logits(toy_states(token_ids)[-1]))
    await rig.idle()


async def read(
    call: FetchCall,
) -> prefill_pb2.FetchDown:
    message = await asyncio.wait_for(call.read(), 10)
    assert isinstance(message, prefill_pb2.FetchDown)
    return message


async def read_commit(
    call: FetchCall,
) -> prefill_pb2.Commit:
    while True:
        message = await read(call)
        if message.WhichOneof("message") == "commit":
            return message.commit


async def read_to_status(call: FetchCall) -> grpc.StatusCode:
    """The stream's status, which gRPC holds back until every message has been read."""
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        while True:
            await read(call)
    return ended.value.code()
