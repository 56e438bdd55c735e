"""Receivers that leave, fall silent or run out of time: every block comes back (CASES B23–B25)."""

import asyncio
import sys
from pathlib import Path

import grpc
import grpc.aio
import pytest

from core.clock import FakeClock
from core.errors import DeadlineExceeded
from decode.handoff import PeerRefused
from engine.kv_cache import OutOfBlocks
from outrider.v1 import prefill_pb2_grpc
from tests.support.handoff_rig import Rig, TableSink
from tests.support.stalling_receiver import pack
from tests.support.toy_engine import StepGate
from tests.support.toy_handoff import (
    PATIENT,
    QUICK,
    assert_serves,
    entered,
    prompt,
    read,
    read_commit,
    read_to_status,
    toy_rig,
)


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

    async def test_a_stream_that_is_never_opened_ends_after_the_progress_deadline(self) -> None:
        async with toy_rig(handoff=QUICK) as (rig, _):
            async with grpc.aio.insecure_channel(rig.peer.address) as channel:
                call = prefill_pb2_grpc.PrefillStub(channel).Fetch()
                assert await asyncio.wait_for(call.code(), 10) is grpc.StatusCode.CANCELLED
            await assert_serves(rig, prompt(90))

    async def test_a_receiver_that_takes_nothing_in_loses_its_blocks_after_the_progress_deadline(
        self,
    ) -> None:
        async with toy_rig(handoff=QUICK) as (rig, _):
            async with rig.raw_stream(prompt(200), credit_bytes=2**12) as call:
                assert (await read(call)).WhichOneof("message") == "announce"
                await rig.until(lambda status: status.used_blocks == 50)
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
        async with toy_rig() as (rig, _):
            table = rig.receiver.open()
            sink = TableSink(rig.receiver, table)
            sink.refusal = OutOfBlocks(9, 0)
            token_ids = prompt(40)
            with pytest.raises(OutOfBlocks):
                await rig.client.fetch(rig.peer, rig.ticket(token_ids), token_ids, 0, sink)
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
