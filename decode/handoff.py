"""The decode side of the hand-off: one Fetch stream for each prompt whose KV a prefill worker computes."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import grpc
from grpc.aio import AioRpcError, Channel, StreamStreamCall
from opentelemetry.trace import StatusCode

from core.auth import bearer_metadata
from core.clock import Clock, SystemClock
from core.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument
from core.grpc_errors import from_rpc_error
from core.grpc_options import channel_options
from core.peer import GRPC_TRANSPORT, require_compatible
from core.records import PrefillPeer
from core.settings import GrpcSettings, HandoffSettings
from core.telemetry import metadata_with_context, tracer
from core.telemetry_names import (
    CACHED_TOKENS,
    HANDOFF_BLOCKS,
    HANDOFF_OUTCOME,
    HANDOFF_SIZE,
    HANDOFF_TRANSPORT,
    SPAN_FETCH,
)
from decode.handoff_errors import (
    ChecksumFailed,
    FetchResult,
    HandoffFailed,
    PeerRefused,
    PeerUnavailable,
    ProgressTimeout,
)
from decode.handoff_intake import HandoffSink, Intake, WantedRanges
from decode.handoff_stream import FetchStream
from engine.kv_layout import KvLayout
from outrider.v1 import common_pb2, prefill_pb2, prefill_pb2_grpc

__all__ = [
    "ChecksumFailed",
    "FetchResult",
    "HandoffClient",
    "HandoffFailed",
    "HandoffSink",
    "PeerRefused",
    "PeerUnavailable",
    "ProgressTimeout",
]

_GrpcCall = StreamStreamCall[prefill_pb2.FetchUp, prefill_pb2.FetchDown]
_GONE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.UNKNOWN)
_MESSAGE_MARGIN_BYTES = 1024
_ENDING_S = 2.0
"""How long a stream that is over may take to say so before it is cancelled."""


class _Connection:
    """One channel to one life of a prefill worker; the handshake is made once on it.

    `silences` counts handshakes without an answer: who waited behind one has waited long enough.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.stub = prefill_pb2_grpc.PrefillStub(channel)
        self.lock = asyncio.Lock()
        self.compatible = False
        self.silences = 0


class HandoffClient:
    """Fetches KV. Used on one event loop; `close` ends its channels and streams."""

    def __init__(
        self,
        ours: common_pb2.PeerInfo,
        layout: KvLayout,
        vocab_size: int,
        settings: HandoffSettings,
        grpc_settings: GrpcSettings,
        *,
        bearer_token: str | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._ours = ours
        self._layout = layout
        self._vocab_size = vocab_size
        self._settings = settings
        self._options = channel_options(grpc_settings)
        self._max_message_bytes = grpc_settings.max_message_bytes - _MESSAGE_MARGIN_BYTES
        self._metadata = bearer_metadata(bearer_token)
        self._clock = clock or SystemClock()
        self._connections: dict[PrefillPeer, _Connection] = {}
        self._transfers = ThreadPoolExecutor(1, thread_name_prefix="handoff-intake")
        self._ending: set[asyncio.Task[None]] = set()
        self.num_live = 0

    async def close(self) -> None:
        """End all streams and channels."""
        for task in self._ending:
            task.cancel()
        await asyncio.gather(*self._ending, return_exceptions=True)
        for connection in self._connections.values():
            await connection.channel.close()
        self._connections.clear()
        self._transfers.shutdown(wait=False)

    async def fetch(
        self,
        peer: PrefillPeer,
        ticket: common_pb2.Ticket,
        token_ids: Sequence[int],
        kv_start: int,
        sink: HandoffSink,
        deadline_s: float | None = None,
        *,
        hidden_start: int | None = None,
    ) -> FetchResult:
        """K and V of tokens kv_start … end of the prompt, and the logits of its last token.

        Hidden planes come from `hidden_start` on (None: kv_start). `deadline_s` is a point of `Clock.now_s()`.
        Raises HandoffFailed in one of its kinds, or DeadlineExceeded; whatever `sink.reserve` raises passes
        through. The stream is over when it returns or raises, but for its last farewell. Cancelling it
        cancels the stream.
        """
        wanted = WantedRanges(len(token_ids), kv_start, kv_start if hidden_start is None else hidden_start)
        intake = Intake(self._layout, wanted, self._vocab_size, sink)
        stream = FetchStream(self._settings, self._transfers, intake, sink)
        outcome = "ok"
        self.num_live += 1
        with tracer().start_as_current_span(
            SPAN_FETCH, record_exception=False, set_status_on_exception=False
        ) as span:
            span.set_attribute(HANDOFF_TRANSPORT, GRPC_TRANSPORT)
            try:
                async with _deadline(self._remaining_s(deadline_s)):
                    call = await self._open(peer, ticket, token_ids, wanted, deadline_s)
                    result = await self._run(stream, call, peer)
            except BaseException as error:  # boundary: told to the span, then raised again
                outcome = _outcome(error)
                span.set_status(StatusCode.ERROR, outcome)
                raise
            finally:
                self.num_live -= 1
                span.set_attribute(HANDOFF_OUTCOME, outcome)
                span.set_attribute(HANDOFF_SIZE, intake.num_bytes)
            span.set_attribute(HANDOFF_BLOCKS, result.blocks)
            span.set_attribute(CACHED_TOKENS, result.cached_tokens)
            return result

    async def _open(
        self,
        peer: PrefillPeer,
        ticket: common_pb2.Ticket,
        token_ids: Sequence[int],
        wanted: WantedRanges,
        deadline_s: float | None,
    ) -> "_Call":
        timeout_s = self._remaining_s(deadline_s)
        connection = await self._connection(peer, timeout_s)
        message = prefill_pb2.FetchOpen(
            ticket=ticket,
            token_ids=token_ids,
            kv_range=prefill_pb2.TokenRange(start=wanted.kv_start, end=wanted.num_tokens),
            transport=GRPC_TRANSPORT,
            credit_bytes=self._settings.credit_bytes,
        )
        if self._layout.hidden_layers:
            message.hidden_range.CopyFrom(
                prefill_pb2.TokenRange(start=wanted.hidden_start, end=wanted.num_tokens)
            )
        if message.ByteSize() > self._max_message_bytes:
            raise PeerRefused(
                InvalidArgument(
                    "token_ids",
                    f"a prompt of {wanted.num_tokens} tokens does not fit in a message of "
                    f"{self._max_message_bytes} bytes",
                )
            )
        grpc_call: _GrpcCall = connection.stub.Fetch(
            timeout=self._remaining_s(deadline_s), metadata=metadata_with_context(self._metadata)
        )
        call = _Call(grpc_call, peer)
        try:
            async with asyncio.timeout(self._settings.progress_timeout_s):
                await call.write(prefill_pb2.FetchUp(open=message))
        except TimeoutError as error:
            call.cancel()
            raise PeerUnavailable(f"{peer.worker_id} takes no messages") from error
        except BaseException:  # boundary: cleaned up, then raised again
            call.cancel()
            raise
        return call

    async def _run(self, stream: FetchStream, call: "_Call", peer: PrefillPeer) -> FetchResult:
        try:
            result = await stream.run(call, peer)
        except ChecksumFailed:
            await call.say_farewell()
            raise
        except BaseException:  # boundary: cleaned up, then raised again
            call.cancel()
            raise
        ending = asyncio.create_task(call.say_farewell())
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
        return result

    async def _connection(self, peer: PrefillPeer, timeout_s: float | None) -> _Connection:
        connection = self._connections.get(peer)
        if connection is None:
            await self._forget_earlier_lives(peer)
            connection = _Connection(grpc.aio.insecure_channel(peer.address, options=self._options))
            self._connections[peer] = connection
        silences = connection.silences
        async with connection.lock:
            if connection.silences != silences:
                raise PeerUnavailable(f"{peer.worker_id} does not answer the handshake")
            if not connection.compatible:
                await self._shake_hands(peer, connection, timeout_s)
        return connection

    async def _shake_hands(self, peer: PrefillPeer, connection: _Connection, timeout_s: float | None) -> None:
        limit_s = self._settings.progress_timeout_s
        request = prefill_pb2.HandshakeRequest(peer=self._ours)
        try:
            reply = await connection.stub.Handshake(
                request,
                timeout=limit_s if timeout_s is None else min(limit_s, timeout_s),
                metadata=metadata_with_context(self._metadata),
            )
        except AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                connection.silences += int(timeout_s is None or timeout_s >= limit_s)
                raise PeerUnavailable(f"{peer.worker_id} does not answer the handshake") from error
            raise _from_status(error, peer) from error
        if (reply.peer.worker_id, reply.peer.epoch) != (peer.worker_id, peer.epoch):
            raise PeerUnavailable(f"{peer.worker_id} lives another life now")
        try:
            require_compatible(self._ours, reply.peer)
        except FailedPrecondition as error:
            raise PeerRefused(error) from error
        connection.compatible = True

    async def _forget_earlier_lives(self, peer: PrefillPeer) -> None:
        for known in [known for known in self._connections if known.worker_id == peer.worker_id]:
            await self._connections.pop(known).channel.close()

    def _remaining_s(self, deadline_s: float | None) -> float | None:
        if deadline_s is None:
            return None
        remaining_s = deadline_s - self._clock.now_s()
        if remaining_s <= 0:
            raise DeadlineExceeded("the deadline passed during the hand-off")
        return remaining_s


@asynccontextmanager
async def _deadline(timeout_s: float | None) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError as error:
        raise DeadlineExceeded("the deadline passed during the hand-off") from error


class _Call:
    """A gRPC stream as a `FetchCall`: its end becomes an error of ours."""

    def __init__(self, call: _GrpcCall, peer: PrefillPeer) -> None:
        self._call = call
        self._peer = peer

    async def read(self) -> prefill_pb2.FetchDown:
        """See `FetchCall.read`."""
        try:
            message = await self._call.read()
        except AioRpcError as error:
            raise _from_status(error, self._peer) from error
        if isinstance(message, prefill_pb2.FetchDown):
            return message
        raise PeerUnavailable(f"{self._peer.worker_id} ended the stream before its commit")

    async def write(self, message: prefill_pb2.FetchUp) -> None:
        """See `FetchCall.write`."""
        try:
            await self._call.write(message)
        except AioRpcError as error:
            raise _from_status(error, self._peer) from error
        except asyncio.InvalidStateError:
            await self.read()

    async def say_farewell(self) -> None:
        """Half-close and wait until the peer has ended the stream, so that it holds nothing any more."""
        try:
            async with asyncio.timeout(_ENDING_S):
                await self._call.done_writing()
                while await self._call.read() is not grpc.aio.EOF:
                    pass
        except (TimeoutError, AioRpcError, asyncio.InvalidStateError):
            pass
        finally:
            self._call.cancel()

    def cancel(self) -> None:
        """End the stream now."""
        self._call.cancel()


def _from_status(error: AioRpcError, peer: PrefillPeer) -> HandoffFailed | DeadlineExceeded:
    refusal = from_rpc_error(error)
    if error.code() in _GONE:
        return PeerUnavailable(f"{peer.worker_id}: {refusal.message}")
    if isinstance(refusal, DeadlineExceeded):
        return refusal
    return PeerRefused(refusal)


_OUTCOMES: dict[type[BaseException], str] = {
    PeerUnavailable: "peer_unavailable",
    PeerRefused: "refused",
    ChecksumFailed: "checksum_failed",
    ProgressTimeout: "progress_timeout",
    DeadlineExceeded: "deadline_exceeded",
    asyncio.CancelledError: "cancelled",
}


def _outcome(error: BaseException) -> str:
    return _OUTCOMES.get(type(error), "failed")
