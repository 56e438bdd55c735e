"""The router on gRPC: `Inference` and `Admin`. Errors become statuses with trailers here, and only here."""

import logging
from collections.abc import Awaitable, Callable
from typing import TypeAlias, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from core.clock import Clock, SystemClock
from core.errors import Internal, InvalidArgument, ServiceError
from core.grpc_errors import abort
from outrider.v1 import admin_pb2, admin_pb2_grpc, inference_pb2
from router.metadata import caller_from_metadata
from router.router import Router

_LOG = logging.getLogger(__name__)
_MAX_GRACE_S = 3600.0

Context: TypeAlias = "grpc.aio.ServicerContext[object, object]"
Result = TypeVar("Result")


class Malformed:
    """Stands in for a message whose bytes are no valid GenerateRequest, such as a string with a lone surrogate."""


def parse_generate(data: bytes) -> inference_pb2.GenerateRequest | Malformed:
    """Never raises, so that a malformed message is answered INVALID_ARGUMENT rather than INTERNAL by gRPC itself."""
    try:
        return inference_pb2.GenerateRequest.FromString(data)
    except DecodeError:
        return Malformed()


class RouterService:
    """The servicer of both services. `add_to` registers it; nothing else is needed."""

    def __init__(self, router: Router, clock: Clock | None = None) -> None:
        self._router = router
        self._clock: Clock = clock if clock is not None else SystemClock()

    def add_to(self, server: grpc.aio.Server) -> None:
        """Registers `Inference` and `Admin` on a server."""
        generate = grpc.unary_stream_rpc_method_handler(
            self.Generate,
            request_deserializer=parse_generate,
            response_serializer=inference_pb2.GenerateResponse.SerializeToString,
        )
        handler = grpc.method_handlers_generic_handler("outrider.v1.Inference", {"Generate": generate})
        server.add_generic_rpc_handlers((handler,))
        admin_pb2_grpc.add_AdminServicer_to_server(self, server)

    async def Generate(self, request: inference_pb2.GenerateRequest | Malformed, context: Context) -> None:
        """`Inference.Generate`. Writing waits for the client's flow control, and so does everything behind it."""

        async def answer() -> None:
            if isinstance(request, Malformed):
                raise InvalidArgument(
                    "request", "is not a valid GenerateRequest; strings must be valid UTF-8"
                )
            remaining_s = context.time_remaining()
            deadline_s = None if remaining_s is None else self._clock.now_s() + remaining_s
            caller = caller_from_metadata(_metadata(context), deadline_s)
            await self._router.generate(request, caller, context.write)

        await _answering(context, answer)

    async def Status(self, _: admin_pb2.StatusRequest, context: Context) -> admin_pb2.WorkerStatus:
        """`Admin.Status` of the router itself."""
        return self._router.status()

    async def Drain(self, request: admin_pb2.DrainRequest, context: Context) -> admin_pb2.DrainResponse:
        """`Admin.Drain`: of the router, or passed on to a worker."""

        async def drain() -> admin_pb2.DrainResponse:
            if not 0 <= request.grace_s <= _MAX_GRACE_S:
                raise InvalidArgument("grace_s", f"must be 0 to {_MAX_GRACE_S}")
            own = self._router.status().worker_id
            if request.worker_id in ("", own):
                return admin_pb2.DrainResponse(remaining=await self._router.drain(request.grace_s))
            return await self._router.calls.drain(self._router.worker(request.worker_id), request.grace_s)

        return await _answering(context, drain)

    async def ListWorkers(
        self, _: admin_pb2.ListWorkersRequest, context: Context
    ) -> admin_pb2.ListWorkersResponse:
        """`Admin.ListWorkers`: this router and every worker, asked now."""
        return admin_pb2.ListWorkersResponse(workers=await self._router.list_workers())

    async def ListDrafters(
        self, _: admin_pb2.ListDraftersRequest, context: Context
    ) -> admin_pb2.ListDraftersResponse:
        """`Admin.ListDrafters`."""
        return admin_pb2.ListDraftersResponse(drafters=self._router.list_drafters())

    async def ReloadPolicies(
        self, _: admin_pb2.ReloadPoliciesRequest, context: Context
    ) -> admin_pb2.ReloadPoliciesResponse:
        """`Admin.ReloadPolicies`: all of the file, or INVALID_ARGUMENT and no change."""

        async def reload() -> admin_pb2.ReloadPoliciesResponse:
            return admin_pb2.ReloadPoliciesResponse(policies=await self._router.reload_policies())

        return await _answering(context, reload)


async def _answering(context: Context, work: Callable[[], Awaitable[Result]]) -> Result:
    """Runs `work`; a ServiceError ends the call with its status and trailers, anything else with INTERNAL."""
    try:
        return await work()
    except ServiceError as error:
        await abort(context, error)
        raise
    except grpc.aio.AbortError:
        raise
    except Exception as error:  # boundary: our own fault; the caller is told no more than that
        _LOG.exception("router: unexpected error")
        await abort(context, Internal(f"unexpected {type(error).__name__}"))
        raise


def _metadata(context: Context) -> tuple[tuple[str, str | bytes], ...]:
    return tuple((key, value) for key, value in context.invocation_metadata() or ())
