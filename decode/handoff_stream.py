"""One Fetch stream from its announcement to its acknowledgement, without the network."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

from core.records import PrefillPeer
from core.settings import HandoffSettings
from decode.handoff_errors import ChecksumFailed, FetchResult, PeerUnavailable, ProgressTimeout
from decode.handoff_intake import HandoffSink, Intake
from outrider.v1 import prefill_pb2

Argument = TypeVar("Argument")
Result = TypeVar("Result")


class FetchCall(Protocol):
    """The two directions of an opened stream. Both raise HandoffFailed or DeadlineExceeded once it has ended."""

    async def read(self) -> prefill_pb2.FetchDown:
        """The next message."""
        ...

    async def write(self, message: prefill_pb2.FetchUp) -> None:
        """Send a message."""
        ...


class FetchStream:
    """Runs one opened stream. `transfers`: the thread that checks and stores planes."""

    def __init__(
        self, settings: HandoffSettings, transfers: ThreadPoolExecutor, intake: Intake, sink: HandoffSink
    ) -> None:
        self._settings = settings
        self._transfers = transfers
        self._intake = intake
        self._sink = sink

    async def run(self, call: FetchCall, peer: PrefillPeer) -> FetchResult:
        """Raises HandoffFailed in one of its kinds, and whatever the sink's `reserve` raises."""
        announce = (await self._read(call, self._settings.queue_timeout_s, "announce")).announce
        num_tokens = self._intake.wanted.num_tokens
        if (announce.peer.worker_id, announce.peer.epoch) != (peer.worker_id, peer.epoch):
            raise PeerUnavailable(f"{peer.worker_id} lives another life now")
        if announce.num_tokens != num_tokens:
            raise ChecksumFailed(f"{announce.num_tokens} tokens announced, {num_tokens} wanted")
        await self._sink.reserve(num_tokens)
        while True:
            message = await self._read(call, self._settings.progress_timeout_s, "chunk", "commit")
            if message.WhichOneof("message") == "commit":
                return await self._acknowledge(call, message.commit, announce.cached_tokens)
            num_bytes = await self._off_loop(self._intake.take_chunk, message.chunk)
            if num_bytes:
                await self._write(call, prefill_pb2.FetchUp(credit=prefill_pb2.Credit(bytes=num_bytes)))

    async def _acknowledge(
        self, call: FetchCall, commit: prefill_pb2.Commit, cached_tokens: int
    ) -> FetchResult:
        logits, checksum = self._intake.take_commit(commit)
        acknowledge = prefill_pb2.Acknowledge(checksum=checksum)
        await self._write(call, prefill_pb2.FetchUp(acknowledge=acknowledge))
        return FetchResult(
            logits, self._intake.num_bytes, self._intake.num_blocks, cached_tokens, commit.prefill_s
        )

    async def _read(self, call: FetchCall, timeout_s: float, *expected: str) -> prefill_pb2.FetchDown:
        try:
            async with asyncio.timeout(timeout_s):
                message = await call.read()
        except TimeoutError as error:
            raise ProgressTimeout(f"no {' or '.join(expected)} for {timeout_s} s") from error
        if message.WhichOneof("message") not in expected:
            raise ChecksumFailed(f"{message.WhichOneof('message')} came where {expected} was due")
        return message

    async def _write(self, call: FetchCall, message: prefill_pb2.FetchUp) -> None:
        try:
            async with asyncio.timeout(self._settings.progress_timeout_s):
                await call.write(message)
        except TimeoutError as error:
            raise ProgressTimeout("the peer takes no messages") from error

    async def _off_loop(self, action: Callable[[Argument], Result], argument: Argument) -> Result:
        """Run on the transfer thread; on cancellation too it has ended before this returns."""
        future = asyncio.get_running_loop().run_in_executor(self._transfers, action, argument)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait([future])
            raise
