"""The gRPC face of a prefill worker."""

import asyncio
import logging
from typing import Any, NoReturn

import grpc
from grpc.aio import AioRpcError, ServicerContext

from core.errors import Cancelled, Internal, InvalidArgument, ServiceError
from core.grpc_errors import abort
from core.telemetry import context_from_metadata
from outrider.v1 import admin_pb2, admin_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from prefill.worker import PrefillWorker

_LOG = logging.getLogger(__name__)
_Context = ServicerContext[Any, Any]  # invariant in its types, and one helper serves every call


class _ServerCall:
    """A stream as `prefill.stream.FetchCall`."""

    def __init__(self, context: _Context) -> None:
        self._context = context

    async def read(self) -> prefill_pb2.FetchUp | None:
        """See `FetchCall.read`."""
        try:
            message = await self._context.read()
        except (AioRpcError, grpc.aio.InternalError, grpc.aio.BaseError) as error:
            raise Cancelled("hand-off: the stream broke") from error
        return message if isinstance(message, prefill_pb2.FetchUp) else None

    async def write(self, message: prefill_pb2.FetchDown) -> None:
        """See `FetchCall.write`."""
        try:
            await self._context.write(message)
        except (AioRpcError, grpc.aio.InternalError, grpc.aio.BaseError) as error:
            raise Cancelled("hand-off: the stream broke") from error


class PrefillService(prefill_pb2_grpc.PrefillServicer):
    """`Prefill` over one worker."""

    def __init__(self, worker: PrefillWorker) -> None:
        self._worker = worker

    async def Handshake(
        self, request: prefill_pb2.HandshakeRequest, context: _Context
    ) -> prefill_pb2.HandshakeResponse:
        """See the proto."""
        try:
            return prefill_pb2.HandshakeResponse(peer=self._worker.handshake(request.peer))
        except ServiceError as error:
            await _refuse(context, error)

    async def Fetch(self, request_iterator: object, context: _Context) -> None:
        """See the proto. `request_iterator` is not used: reads must be able to end with the call."""
        call = _ServerCall(context)
        trace = context_from_metadata(context.invocation_metadata())
        timeout_s = context.time_remaining()
        try:
            first = await self._opening(call)
            if first is None or first.WhichOneof("message") != "open":
                raise InvalidArgument("message", "the first message opens the stream")
            await self._worker.serve(first.open, call, trace, timeout_s)
        except ServiceError as error:
            await _refuse(context, error)
        except Exception:  # boundary: our own fault ends this stream only
            _LOG.exception("a Fetch failed")
            await _refuse(context, Internal("prefill failed"))

    async def _opening(self, call: _ServerCall) -> prefill_pb2.FetchUp | None:
        patience_s = self._worker.patience_s
        try:
            async with asyncio.timeout(patience_s):
                return await call.read()
        except TimeoutError as error:
            raise Cancelled(f"hand-off: the stream was not opened within {patience_s} s") from error


class PrefillAdminService(admin_pb2_grpc.AdminServicer):
    """`Admin` over one worker: its own status and drain."""

    def __init__(self, worker: PrefillWorker) -> None:
        self._worker = worker

    async def Status(self, request: admin_pb2.StatusRequest, context: _Context) -> admin_pb2.WorkerStatus:
        """See the proto."""
        return self._worker.status()

    async def Drain(self, request: admin_pb2.DrainRequest, context: _Context) -> admin_pb2.DrainResponse:
        """See the proto."""
        if request.worker_id not in ("", self._worker.identity.worker_id):
            await _refuse(context, InvalidArgument("worker_id", f"{request.worker_id!r} is not this worker"))
        return admin_pb2.DrainResponse(remaining=await self._worker.drain(max(0.0, request.grace_s)))


def add_prefill_services(server: grpc.aio.Server, worker: PrefillWorker) -> None:
    """Register both services."""
    prefill_pb2_grpc.add_PrefillServicer_to_server(PrefillService(worker), server)
    admin_pb2_grpc.add_AdminServicer_to_server(PrefillAdminService(worker), server)


async def _refuse(context: _Context, error: ServiceError) -> NoReturn:
    await abort(context, error)
    raise AssertionError("abort raises")
