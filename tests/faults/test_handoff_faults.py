"""What goes wrong in a hand-off costs time or a clean error (CASES B32, B52, S05, S11)."""

import asyncio
from collections.abc import Sequence

import grpc
import grpc.aio
import pytest
import torch
from torch import Tensor

from core.errors import InvalidArgument
from decode.handoff import ChecksumFailed, HandoffFailed, PeerRefused, PeerUnavailable, ProgressTimeout
from engine.kv_cache import KvCache
from engine.plane_codec import crc32_of
from engine.step_batch import SequenceStep
from outrider.v1 import prefill_pb2
from prefill.planes import PlaneRange, encode_message
from tests.support.handoff_rig import TableSink
from tests.support.toy_engine import StepGate, toy_logits, toy_states
from tests.support.toy_handoff import (
    QUICK,
    FetchCall,
    assert_serves,
    entered,
    prompt,
    read,
    read_commit,
    toy_rig,
)


class TestDuplicates:
    async def test_a_second_live_fetch_of_an_attempt_is_refused_and_the_first_one_goes_on(self) -> None:
        gate = StepGate()
        async with toy_rig(gate=gate) as (rig, _):
            token_ids = prompt(40)
            ticket = rig.ticket(token_ids, request_id="same")
            first_sink, second_sink = (TableSink(rig.receiver, rig.receiver.open()) for _ in range(2))
            first = asyncio.create_task(rig.client.fetch(rig.peer, ticket, token_ids, 0, first_sink))
            await entered(gate)
            with pytest.raises(PeerRefused) as refused:
                await rig.client.fetch(rig.peer, ticket, token_ids, 0, second_sink)
            assert refused.value.error.field == "ticket.request_id"
            gate.open()
            result = await first
            assert torch.equal(result.logits, toy_logits(toy_states(token_ids)[-1]))
            await rig.idle()
            await rig.client.fetch(rig.peer, ticket, token_ids, 0, second_sink)
            await rig.idle()

    async def test_two_attempts_of_one_request_may_live_at_once(self) -> None:
        async with toy_rig() as (rig, _):
            token_ids = prompt(40)
            sinks = [TableSink(rig.receiver, rig.receiver.open()) for _ in range(2)]
            tickets = [rig.ticket(token_ids, request_id="same", attempt=attempt) for attempt in range(2)]
            await asyncio.gather(
                *(
                    rig.client.fetch(rig.peer, ticket, token_ids, 0, sink)
                    for ticket, sink in zip(tickets, sinks, strict=True)
                )
            )
            await rig.idle()

    async def test_a_doubled_acknowledgement_frees_once_and_touches_nobody_else(self) -> None:
        async with toy_rig() as (rig, _), rig.raw_stream(prompt(20, start=1)) as other:
            await read_commit(other)
            async with rig.raw_stream(prompt(20)) as call:
                checksum = (await read_commit(call)).checksum
                acknowledge = prefill_pb2.FetchUp(acknowledge=prefill_pb2.Acknowledge(checksum=checksum))
                await call.write(acknowledge)
                with pytest.raises((asyncio.InvalidStateError, AssertionError)):
                    await call.write(acknowledge)
                    await read(call)
                assert await call.code() is grpc.StatusCode.OK
            await rig.until(lambda status: (status.leases, status.used_blocks) == (1, 5))

    @pytest.mark.parametrize("checksum", [0, 2**64 - 1])
    async def test_an_acknowledgement_before_the_commit_ends_the_stream_with_an_error(
        self, checksum: int
    ) -> None:
        gate = StepGate()
        async with toy_rig(gate=gate) as (rig, _), rig.raw_stream(prompt(20)) as call:
            await entered(gate)
            assert (await read(call)).WhichOneof("message") == "announce"
            await call.write(prefill_pb2.FetchUp(acknowledge=prefill_pb2.Acknowledge(checksum=checksum)))
            assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
            gate.open()
            await rig.idle()

    async def test_credit_for_bytes_never_sent_ends_the_stream_with_an_error(self) -> None:
        async with toy_rig() as (rig, _), rig.raw_stream(prompt(20)) as call:
            await read_commit(call)
            await call.write(prefill_pb2.FetchUp(credit=prefill_pb2.Credit(bytes=2**30)))
            assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
            await rig.idle()


class TestPinning:
    async def test_a_slow_reader_keeps_its_blocks_and_gets_right_planes_while_others_wait(self) -> None:
        async with toy_rig(num_blocks=12) as (rig, _), rig.raw_stream(prompt(40), credit_bytes=2**12) as slow:
            await read(slow)
            waiting = asyncio.create_task(rig.fetch(prompt(40, start=3)))
            await rig.until(lambda status: (status.leases, status.waiting) == (2, 1))
            received: dict[tuple[int, int], bytes] = {}
            while True:
                message = await read(slow)
                if message.WhichOneof("message") == "commit":
                    break
                for plane in message.chunk.planes:
                    key = (plane.kind, plane.layer)
                    received[key] = received.get(key, b"") + plane.data
                taken = sum(len(plane.data) for plane in message.chunk.planes)
                await slow.write(prefill_pb2.FetchUp(credit=prefill_pb2.Credit(bytes=taken)))
                assert not waiting.done()
            states = torch.frombuffer(bytearray(received[1, 0]), dtype=torch.float32).view(40, -1)[:, 0]
            assert states.tolist() == toy_states(prompt(40))
            checksum = message.commit.checksum
            await slow.write(prefill_pb2.FetchUp(acknowledge=prefill_pb2.Acknowledge(checksum=checksum)))
            _, result = await asyncio.wait_for(waiting, 10)
            assert torch.equal(result.logits, toy_logits(toy_states(prompt(40, start=3))[-1]))
            await rig.idle()


class TestFailures:
    async def test_a_failing_step_is_a_typed_error_and_the_worker_lives_on(self) -> None:
        async with toy_rig() as (rig, engine):
            num_calls = 0

            def fail_second(sequences: Sequence[SequenceStep]) -> None:
                nonlocal num_calls
                num_calls += 1
                if num_calls == 2:
                    raise RuntimeError("injected")

            engine.before_step = fail_second
            with pytest.raises(PeerRefused) as refused:
                await rig.fetch(prompt(40))
            assert num_calls == 2
            assert refused.value.error.status == "INTERNAL"
            await assert_serves(rig, prompt(40))

    async def test_a_silent_sender_is_a_progress_timeout_never_a_success(self) -> None:
        gate = StepGate()
        async with toy_rig(client_handoff=QUICK, gate=gate) as (rig, _):
            gate.allow()
            with pytest.raises(ProgressTimeout):
                await rig.fetch(prompt(40))
            await entered(gate)
            await rig.until(lambda status: status.leases == 0)
            gate.open()
            await rig.idle()
            await assert_serves(rig, prompt(40))

    async def test_a_receiver_whose_turn_has_not_come_is_kept_waiting_by_empty_chunks(self) -> None:
        gate = StepGate()
        async with toy_rig(handoff=QUICK, gate=gate) as (rig, _), rig.raw_stream(prompt(64)):
            await entered(gate)
            async with rig.raw_stream(prompt(120, start=1)) as middle:
                await rig.until(lambda status: status.leases == 2)
                for _ in range(2):
                    gate.allow()
                    await entered(gate)
                assert (await read(middle)).WhichOneof("message") == "announce"
                async with rig.raw_stream(prompt(50, start=2)):
                    await rig.until(lambda status: status.leases == 3)
                    empty = asyncio.create_task(self._first_empty(middle))
                    while not empty.done():
                        gate.allow()
                        await entered(gate)
                        await asyncio.wait([empty], timeout=QUICK.progress_timeout_s / 3)
                    assert await empty

    async def _first_empty(self, call: FetchCall) -> bool:
        while True:
            message = await read(call)
            if message.WhichOneof("message") == "chunk" and not message.chunk.planes:
                return True

    @pytest.mark.parametrize("part", ["plane", "logits"])
    async def test_damaged_bytes_are_found_and_the_same_attempt_can_fetch_again_at_once(
        self, part: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with toy_rig() as (rig, _):
            token_ids = prompt(40)
            ticket = rig.ticket(token_ids)
            sink = TableSink(rig.receiver, rig.receiver.open())
            damaged = []

            def damage_plane(kv: KvCache, slots: Tensor, planes: tuple[PlaneRange, ...]) -> prefill_pb2.Chunk:
                chunk = encode_message(kv, slots, planes)
                chunk.planes[-1].data = bytes([chunk.planes[-1].data[0] ^ 1]) + chunk.planes[-1].data[1:]
                damaged.append("plane")
                return chunk

            def damage_logits(data: bytes) -> int:
                damaged.append("logits")
                return crc32_of(data) ^ 1

            with monkeypatch.context() as patch:
                if part == "plane":
                    patch.setattr("prefill.stream.encode_message", damage_plane)
                else:
                    patch.setattr("prefill.stream.crc32_of", damage_logits)
                with pytest.raises(ChecksumFailed, match="damaged"):
                    await rig.client.fetch(rig.peer, ticket, token_ids, 0, sink)
                assert damaged[0] == part
            result = await rig.client.fetch(rig.peer, ticket, token_ids, 0, sink)
            assert torch.equal(result.logits, toy_logits(toy_states(token_ids)[-1]))
            await rig.idle()

    async def test_a_worker_that_stops_in_mid_transfer_is_unavailable(self) -> None:
        gate = StepGate()
        async with toy_rig(gate=gate) as (rig, _):
            fetch = asyncio.create_task(rig.fetch(prompt(40)))
            await entered(gate)
            gate.open()
            await rig.worker.close()
            with pytest.raises(PeerUnavailable):
                await asyncio.wait_for(fetch, 10)

    async def test_a_worker_of_another_epoch_or_gone_is_unavailable(self) -> None:
        async with toy_rig() as (rig, engine):
            earlier = type(rig.peer)(rig.peer.worker_id, "f" * 32, rig.peer.address)
            gone = type(rig.peer)(rig.peer.worker_id, rig.peer.epoch, "127.0.0.1:9")
            for peer in (earlier, gone):
                rig.peer, kept = peer, rig.peer
                with pytest.raises(PeerUnavailable):
                    await asyncio.wait_for(rig.fetch(prompt(9)), 10)
                rig.peer = kept
            assert engine.num_rows == 0
            await assert_serves(rig, prompt(9))

    async def test_draining_refuses_new_prompts_and_ends_the_old_ones(self) -> None:
        gate = StepGate()
        async with toy_rig(gate=gate) as (rig, _):
            old = asyncio.create_task(rig.fetch(prompt(40)))
            await entered(gate)
            assert await rig.worker.drain(0.0) == 1
            assert not rig.worker.ready
            with pytest.raises(PeerUnavailable):
                await rig.fetch(prompt(9))
            gate.open()
            _, result = await old
            assert torch.equal(result.logits, toy_logits(toy_states(prompt(40))[-1]))
            assert await rig.worker.drain(5.0) == 0


class TestSizes:
    async def test_a_prompt_larger_than_the_pool_is_refused_at_once_with_its_size(self) -> None:
        async with toy_rig(num_blocks=8) as (rig, engine):
            with pytest.raises(PeerRefused, match="33 tokens takes 9 blocks, the pool has 8") as refused:
                await rig.fetch(prompt(33))
            assert isinstance(refused.value.error, InvalidArgument)
            assert engine.num_rows == 0
            for num_tokens in (32, 28):
                await assert_serves(rig, prompt(num_tokens))

    async def test_a_prompt_as_large_as_the_pool_waits_its_turn_and_others_pass(self) -> None:
        gate = StepGate()
        async with toy_rig(num_blocks=8, gate=gate) as (rig, _):
            small = asyncio.create_task(rig.fetch(prompt(9)))
            await entered(gate)
            large = asyncio.create_task(rig.fetch(prompt(32, start=1)))
            await rig.until(lambda status: status.leases == 2)
            later = asyncio.create_task(rig.fetch(prompt(10, start=2)))
            await rig.until(lambda status: status.leases == 3)
            gate.open()
            results = await asyncio.wait_for(asyncio.gather(small, large, later), 10)
            for (_, result), token_ids in zip(
                results, (prompt(9), prompt(32, start=1), prompt(10, start=2)), strict=True
            ):
                assert torch.equal(result.logits, toy_logits(toy_states(token_ids)[-1]))
            await rig.idle()

    async def test_cancelling_the_large_one_frees_all(self) -> None:
        gate = StepGate()
        async with toy_rig(num_blocks=8, gate=gate) as (rig, _):
            large = asyncio.create_task(rig.fetch(prompt(32)))
            await entered(gate)
            assert rig.worker.status().waiting == 0
            large.cancel()
            with pytest.raises((asyncio.CancelledError, HandoffFailed)):
                await large
            gate.open()
            await rig.idle()
            await assert_serves(rig, prompt(32, start=4))
