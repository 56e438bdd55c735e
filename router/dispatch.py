"""Calls to workers: channels, the Decode stream, Admin calls. All failures come out as ServiceErrors."""

from collections.abc import AsyncIterator, Iterable

import grpc
import grpc.aio

from core.errors import ServiceError, Unavailable
from core.grpc_errors import from_rpc_error
from core.grpc_options import channel_options
from core.records import WorkerRecord
from core.settings import GrpcSettings
from core.telemetry import metadata_with_context
from outrider.v1 import admin_pb2, admin_pb2_grpc, decode_pb2, decode_pb2_grpc

MAX_CHANNELS = 256
_ADMIN_TIMEOUT_S = 2.0
_LOST = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


class WorkerLost(Unavailable):
    """The worker, or the way to it, broke; another attempt may succeed."""


class WorkerCalls:
    """Channels to workers, one for each life of a worker. `close` at the end."""

    def __init__(self, settings: GrpcSettings, metadata: Iterable[tuple[str, str]]) -> None:
        self._options = channel_options(settings)
        self._metadata = tuple(metadata)
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def generate(
        self, worker: WorkerRecord, request: decode_pb2.DecodeRequest, timeout_s: float | None
    ) -> AsyncIterator[decode_pb2.DecodeEvent]:
        """The events of one attempt; the last one is `finished`. Closing the iterator cancels the call.

        The current trace context and `timeout_s` (what is left of the caller's deadline) travel along.
        Raises WorkerLost where the stream breaks or ends early, else the ServiceError that the worker answered.
        """
        stub = decode_pb2_grpc.DecodeStub(self._channel(worker))
        call = stub.Generate(request, timeout=timeout_s, metadata=metadata_with_context(self._metadata))
        try:
            async for event in call:
                yield event
                if event.HasField("finished"):
                    return
        except grpc.aio.AioRpcError as error:
            raise _translated(error, worker) from error
        finally:
            call.cancel()
        raise WorkerLost(f"decode worker {worker.worker_id} ended its stream early")

    async def status(self, worker: WorkerRecord) -> admin_pb2.WorkerStatus:
        """A worker's own answer about itself."""
        stub = self._admin(worker)
        try:
            status: admin_pb2.WorkerStatus = await stub.Status(
                admin_pb2.StatusRequest(), timeout=_ADMIN_TIMEOUT_S, metadata=self._metadata
            )
            return status
        except grpc.aio.AioRpcError as error:
            raise _translated(error, worker) from error

    async def drain(self, worker: WorkerRecord, grace_s: float) -> admin_pb2.DrainResponse:
        """Has a worker drain itself; returns when it is done or `grace_s` is over."""
        stub = self._admin(worker)
        request = admin_pb2.DrainRequest(worker_id=worker.worker_id, grace_s=grace_s)
        try:
            response: admin_pb2.DrainResponse = await stub.Drain(
                request, timeout=grace_s + _ADMIN_TIMEOUT_S, metadata=self._metadata
            )
            return response
        except grpc.aio.AioRpcError as error:
            raise _translated(error, worker) from error

    async def keep_only(self, epochs: frozenset[str]) -> None:
        """Closes the channels to lives that are gone. `epochs`: all that are known or still in use."""
        for epoch in self._channels.keys() - epochs:
            await self._channels.pop(epoch).close()

    async def close(self) -> None:
        """Ends all channels and the calls on them."""
        await self.keep_only(frozenset())

    def num_channels(self) -> int:
        """Open channels."""
        return len(self._channels)

    def _admin(self, worker: WorkerRecord) -> admin_pb2_grpc.AdminStub:
        return admin_pb2_grpc.AdminStub(self._channel(worker))

    def _channel(self, worker: WorkerRecord) -> grpc.aio.Channel:
        channel = self._channels.get(worker.epoch)
        if channel is None:
            if len(self._channels) >= MAX_CHANNELS:
                raise Unavailable(f"more than {MAX_CHANNELS} channels to workers are open")
            channel = grpc.aio.insecure_channel(worker.address, options=self._options)
            self._channels[worker.epoch] = channel
        return channel


def _translated(error: grpc.aio.AioRpcError, worker: WorkerRecord) -> ServiceError:
    if error.code() in _LOST:
        return WorkerLost(f"{worker.role} worker {worker.worker_id}: {error.code().name}")
    return from_rpc_error(error)
