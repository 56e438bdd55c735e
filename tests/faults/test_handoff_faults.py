"""What goes wrong in a hand-off costs time or a clean error, and every block comes back (CASES B23–B32, S05, S11)."""

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest
import torch
from torch import Tensor

from core.clock import FakeClock
from core.errors import DeadlineExceeded, InvalidArgument
from core.settings import HandoffSettings, PrefillSettings
from decode.handoff import ChecksumFailed, HandoffFailed, PeerRefused, PeerUnavailable, ProgressTimeout
from engine.kv_cache import KvCache, OutOfBlocks
from engine.plane_codec import crc32_of
from engine.step_batch import SequenceStep
from outrider.v1 import prefill_pb2
from prefill.planes import PlaneRange, encode_message
from tests.support.handoff_rig import Rig, TableSink, handoff_rig
from tests.support.stalling_receiver import pack
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


class TestReceiversThatLeave:
    async def test_a_full_pool_of_killed_receivers_is_freed_each_time(self, tmp_path: Path) -> None:
        async with toy_rig(num_blocks=24) as (rig, _):
            for _ in range(3):
                opens = [rig.open(prompt(21, start), credit_bytes=2**12) for start in range(30)]
                file = tmp_path / "opens"
                file.write_bytes(pack(opens))
                receiver = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "tests.support.stalling_receiver", rig.peer.address, str(file)),
                    stdout=asyncio.subprocess.PIPE,
                )
                assert receiver.stdout is not None
                assert await asyncio.wait_for(receiver.stdout.readline(), 20) == b"ready\n"
                await rig.until(lambda status: status.used_blocks == 24 and status.waiting == 26)
                receiver.kill()
                await receiver.wait()
                await rig.idle()
            await assert_serves(rig, prompt(90))

    async def test_three_hundred_cancelled_streams_leave_nothing_behind(self) -> None:
        gate = StepGate()
        async with toy_rig(num_blocks=24, gate=gate) as (rig, _):
            tasks = [asyncio.create_task(rig.fetch(prompt(21, start))) for start in range(300)]
            await entered(gate)
            await rig.until(lambda status: status.leases > 200)
            for task in tasks:
                task.cancel()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(outcome, asyncio.CancelledError | PeerRefused) for outcome in outcomes)
            gate.open()
            await rig.idle()
            assert rig.client.num_live == 0
            await assert_serves(rig, prompt(90))

    async def test_readiness_is_lost_while_silent_receivers_hold_the_whole_pool(self) -> None:
        clock = FakeClock()
        async with toy_rig(num_blocks=8, clock=clock) as (rig, _):
            async with rig.raw_stream(prompt(32)) as call, rig.raw_stream(prompt(8, start=3)):
                await read_commit(call)
                await rig.until(lambda status: (status.used_blocks, status.waiting) == (8, 1))
                assert rig.worker.status().ready
                clock.advance(PATIENT.progress_timeout_s + 1)
                assert not rig.worker.status().ready
            await rig.idle()
            assert rig.worker.status().ready

    async def test_a_receiver_that_takes_nothing_in_loses_its_blocks_after_the_progress_deadline(
        self,
    ) -> None:
        async with toy_rig(handoff=QUICK) as (rig, _):
            async with rig.raw_stream(prompt(200), credit_bytes=2**12) as call:
                assert (await read(call)).WhichOneof("message") == "announce"
                assert rig.worker.status().used_blocks == 50
                await rig.idle()
                assert await read_to_status(call) is grpc.StatusCode.UNAVAILABLE
            await assert_serves(rig, prompt(90))

    async def test_a_receiver_that_never_acknowledges_loses_its_blocks_after_the_progress_deadline(
        self,
    ) -> None:
        async with toy_rig(handoff=QUICK) as (rig, _), rig.raw_stream(prompt(20)) as call:
            await read_commit(call)
            assert rig.worker.status().used_blocks == 5
            await rig.idle()
            assert await read_to_status(call) is grpc.StatusCode.UNAVAILABLE

    async def test_a_receiver_that_closes_without_acknowledging_ends_the_lease_at_once(self) -> None:
        async with toy_rig() as (rig, _), rig.raw_stream(prompt(20)) as call:
            await read_commit(call)
            await call.done_writing()
            await rig.idle()
            assert await call.code() is grpc.StatusCode.CANCELLED

    async def test_the_sink_refusing_after_the_announcement_frees_the_other_side(self) -> None:
        async with toy_rig() as (rig, engine):
            table = rig.receiver.open()
            sink = TableSink(rig.receiver, table)
            sink.refusal = OutOfBlocks(9, 0)
            token_ids = prompt(40)
            with pytest.raises(OutOfBlocks):
                await rig.client.fetch(rig.peer, rig.ticket(token_ids), token_ids, 0, sink)
            assert engine.num_rows > 0
            assert sink.num_writes == 0
            await rig.idle(timeout_s=1.0)
            rig.receiver.close(table)
            await assert_serves(rig, prompt(90))


class TestCancelAndDeadlineAtEachPoint:
    @pytest.mark.parametrize("end", ["cancel", "deadline"])
    async def test_in_the_queue_nothing_is_computed(self, end: str) -> None:
        gate = StepGate()
        async with toy_rig(num_blocks=8, gate=gate) as (rig, engine):
            first = asyncio.create_task(rig.fetch(prompt(32)))
            await entered(gate)
            queued = asyncio.create_task(self._fetch(rig, prompt(30, start=5), end))
            await rig.until(lambda status: status.leases == 2)
            await self._end(queued, end)
            gate.open()
            await first
            await rig.idle()
            assert engine.num_rows == 32

    @pytest.mark.parametrize("end", ["cancel", "deadline"])
    async def test_in_mid_prefill_the_compute_stops(self, end: str) -> None:
        gate = StepGate()
        async with toy_rig(gate=gate) as (rig, engine):
            fetch = asyncio.create_task(self._fetch(rig, prompt(200), end))
            await entered(gate)
            gate.allow()
            await entered(gate)
            assert engine.num_rows == 16
            await self._end(fetch, end)
            await rig.until(lambda status: status.leases == 0)
            gate.open()
            await rig.idle()
            assert engine.num_rows == 32
            await assert_serves(rig, prompt(90))

    @pytest.mark.parametrize("end", ["cancel", "deadline"])
    async def test_during_the_transfer_both_sides_let_go(self, end: str) -> None:
        async with toy_rig() as (rig, _):
            started = asyncio.Event()
            blocked: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            table = rig.receiver.open()
            sink = TableSink(rig.receiver, table)

            def block() -> "asyncio.Future[None]":
                started.set()
                return blocked

            sink.before_reserve = block
            fetch = asyncio.create_task(self._fetch(rig, prompt(200), end, sink))
            await started.wait()
            assert rig.worker.status().leases == 1
            await self._end(fetch, end)
            await rig.idle()
            rig.receiver.close(table)
            rig.receiver.check()
            await assert_serves(rig, prompt(90))

    async def _fetch(self, rig: Rig, token_ids: list[int], end: str, sink: TableSink | None = None) -> None:
        deadline_s = rig.clock.now_s() + 0.3 if end == "deadline" else None
        sink = sink or TableSink(rig.receiver, rig.receiver.open())
        await rig.client.fetch(rig.peer, rig.ticket(token_ids), token_ids, 0, sink, deadline_s)

    async def _end(self, fetch: "asyncio.Task[None]", end: str) -> None:
        if end == "cancel":
            fetch.cancel()
            with pytest.raises(asyncio.CancelledError):
                await fetch
        else:
            with pytest.raises(DeadlineExceeded):
                await asyncio.wait_for(fetch, 10)


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
