"""One Fetch stream from its announcement to its acknowledgement, without the network."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

from core.errors import Cancelled, InvalidArgument, ServiceError, Unavailable
from core.settings import HandoffSettings
from engine.kv_cache import KvCache
from engine.plane_codec import HandoffChecksum, crc32_of, tensor_bytes
from outrider.v1 import common_pb2, prefill_pb2
from prefill.credit import CreditWindow
from prefill.lease import Lease, Progress
from prefill.planes import PlaneRange, encode_message, plan_messages
from prefill.request import FetchRequest

Result = TypeVar("Result")


class FetchCall(Protocol):
    """The two directions of a stream, as its server has them. Both raise ServiceError once it is broken."""

    async def read(self) -> prefill_pb2.FetchUp | None:
        """The receiver's next message; None when it sends no more."""
        ...

    async def write(self, message: prefill_pb2.FetchDown) -> None:
        """Send a message."""
        ...


class PrefillStream:
    """Sends what one lease computes. The caller owns the lease, and releases it after `run`, on every path.

    `copies`: the thread that copies planes out of the pool. `num_steps` counts the engine's steps: while they
    go on, an empty chunk now and then tells a waiting receiver that its turn will come.
    """

    def __init__(
        self,
        request: FetchRequest,
        lease: Lease,
        settings: HandoffSettings,
        kv: KvCache,
        copies: ThreadPoolExecutor,
        num_steps: Callable[[], int],
    ) -> None:
        self._request = request
        self._lease = lease
        self._settings = settings
        self._kv = kv
        self._copies = copies
        self._num_steps = num_steps
        self._credit = CreditWindow(request.credit_bytes)
        self._message_bytes = min(settings.chunk_bytes, request.credit_bytes)
        self._checksum = HandoffChecksum()
        self._num_planes = 0
        self.num_bytes = 0
        self._committed: int | None = None
        self._acknowledged = False

    async def run(self, call: FetchCall, peer: common_pb2.PeerInfo) -> None:
        """Returns once the receiver has acknowledged. Raises ServiceError; no copy is under way afterwards."""
        reader = asyncio.create_task(self._read(call))
        try:
            await self._lease.wait_until(lambda: self._lease.progress is not None)
            progress = self._current()
            announce = prefill_pb2.Announce(
                num_tokens=len(self._request.job.token_ids), cached_tokens=progress.num_cached, peer=peer
            )
            await self._write(call, prefill_pb2.FetchDown(announce=announce))
            await self._send_planes(call)
            await self._commit(call)
        finally:
            reader.cancel()
            await asyncio.wait([reader])

    async def _send_planes(self, call: FetchCall) -> None:
        sent = 0
        while sent < len(self._request.job.token_ids):
            await self._wait_for_more(call, sent)
            progress = self._current()
            kv = self._request.kv.between(sent, progress.num_computed)
            hidden = self._request.hidden.between(sent, progress.num_computed)
            for planes in plan_messages(self._kv.layout, kv, hidden, self._message_bytes):
                await self._send_message(call, progress, planes)
            sent = progress.num_computed

    async def _wait_for_more(self, call: FetchCall, sent: int) -> None:
        seen_steps = self._num_steps()
        patience_s = self._settings.progress_timeout_s / 4
        while not await self._lease.wait_until(lambda: self._worth_sending(sent), patience_s):
            if self._num_steps() != seen_steps:
                seen_steps = self._num_steps()
                await self._write(call, prefill_pb2.FetchDown(chunk=prefill_pb2.Chunk()))

    def _worth_sending(self, sent: int) -> bool:
        """Whether what is computed and not sent fills a message, or is the rest."""
        num_computed = self._current().num_computed
        layout = self._kv.layout
        num_bytes = layout.kv_token_bytes * self._request.kv.between(sent, num_computed).num_tokens
        num_bytes += layout.hidden_token_bytes * self._request.hidden.between(sent, num_computed).num_tokens
        return num_bytes >= self._message_bytes or num_computed == len(self._request.job.token_ids)

    async def _send_message(
        self, call: FetchCall, progress: Progress, planes: tuple[PlaneRange, ...]
    ) -> None:
        num_bytes = sum(plane.num_bytes for plane in planes)
        await self._wait(lambda: self._credit.allows(num_bytes), "takes no planes")
        chunk = await self._off_loop(lambda: encode_message(self._kv, progress.slots, planes))
        for plane in chunk.planes:
            self._checksum.add(plane.crc32)
        self._num_planes += len(planes)
        self.num_bytes += num_bytes
        self._credit.sent(num_bytes)
        await self._write(call, prefill_pb2.FetchDown(chunk=chunk))

    async def _commit(self, call: FetchCall) -> None:
        progress = self._current()
        assert progress.logits is not None
        logits = tensor_bytes(progress.logits)
        crc32 = crc32_of(logits)
        self._checksum.add(crc32)
        self._committed = self._checksum.value()
        commit = prefill_pb2.Commit(
            logits=logits,
            logits_crc32=crc32,
            num_tokens=len(self._request.job.token_ids),
            num_planes=self._num_planes,
            num_bytes=self.num_bytes,
            checksum=self._committed,
            prefill_s=progress.prefill_s,
        )
        self._lease.raise_failure()
        await self._write(call, prefill_pb2.FetchDown(commit=commit))
        await self._wait(lambda: self._acknowledged, "does not acknowledge")

    async def _wait(self, reached: Callable[[], bool], silence: str) -> None:
        """Until the receiver has done something; its silence ends the stream."""
        timeout_s = self._settings.progress_timeout_s
        if not await self._lease.wait_until(reached, timeout_s):
            raise Unavailable(f"hand-off: the receiver {silence} for {timeout_s} s")

    async def _write(self, call: FetchCall, message: prefill_pb2.FetchDown) -> None:
        timeout_s = self._settings.progress_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await call.write(message)
        except TimeoutError as error:
            raise Unavailable(f"hand-off: the receiver reads nothing for {timeout_s} s") from error

    async def _read(self, call: FetchCall) -> None:
        """Credits and the acknowledgement; what is wrong with them fails the lease."""
        try:
            while not self._acknowledged:
                message = await call.read()
                if message is None:
                    raise Cancelled("hand-off: the receiver left without acknowledging")
                self._take(message)
                self._lease.notify()
        except ServiceError as error:
            self._lease.fail(error)

    def _take(self, message: prefill_pb2.FetchUp) -> None:
        kind = message.WhichOneof("message")
        if kind == "credit":
            self._credit.returned(message.credit.bytes)
        elif kind == "acknowledge":
            if self._committed is None or message.acknowledge.checksum != self._committed:
                raise InvalidArgument("acknowledge.checksum", "it is not that of the commit")
            self._acknowledged = True
        else:
            raise InvalidArgument("message", f"{kind} is not expected on an open stream")

    def _current(self) -> Progress:
        progress = self._lease.progress
        assert progress is not None
        return progress

    async def _off_loop(self, action: Callable[[], Result]) -> Result:
        """Run on the copy thread; on cancellation too it has ended before this returns."""
        future = asyncio.get_running_loop().run_in_executor(self._copies, action)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait([future])
            raise
