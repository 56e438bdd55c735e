"""Asking a running process about itself: its Admin service and its health. For the CLI and for tests."""

from collections.abc import Iterator
from contextlib import contextmanager

import grpc
from grpc_health.v1 import health_pb2

from core.auth import bearer_metadata
from core.errors import ServiceError, Unavailable
from core.grpc_errors import from_rpc_error
from core.grpc_options import channel_options
from core.settings import GrpcSettings
from outrider.v1 import admin_pb2, admin_pb2_grpc


class AdminClient:
    """Blocking calls to one address. Each raises a ServiceError where the peer does not answer in time."""

    def __init__(self, address: str, bearer_token: str | None = None, timeout_s: float = 5.0) -> None:
        self._address = address
        self._metadata = bearer_metadata(bearer_token)
        self._timeout_s = timeout_s

    def status(self, *, timeline: bool = False) -> admin_pb2.WorkerStatus:
        """What the process says of itself. `timeline`: with the steps of a pipelined target."""
        with self._stub() as stub:
            reply: admin_pb2.WorkerStatus = stub.Status(
                admin_pb2.StatusRequest(timeline=timeline), timeout=self._timeout_s, metadata=self._metadata
            )
        return reply

    def list_workers(self) -> tuple[admin_pb2.WorkerStatus, ...]:
        """Asked of a router: all workers that it knows, itself included or not."""
        with self._stub() as stub:
            reply = stub.ListWorkers(
                admin_pb2.ListWorkersRequest(), timeout=self._timeout_s, metadata=self._metadata
            )
        return tuple(reply.workers)

    def drain(self, grace_s: float, worker_id: str = "") -> int:
        """No new work, running work may end within `grace_s`. Returns what was left then."""
        request = admin_pb2.DrainRequest(worker_id=worker_id, grace_s=grace_s)
        with self._stub() as stub:
            reply = stub.Drain(request, timeout=self._timeout_s + grace_s, metadata=self._metadata)
        return int(reply.remaining)

    def is_serving(self) -> bool:
        """What its health service says; False where it does not answer."""
        with self._channel() as channel:
            check = channel.unary_unary(
                "/grpc.health.v1.Health/Check",
                request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
                response_deserializer=health_pb2.HealthCheckResponse.FromString,
            )
            try:
                reply = check(health_pb2.HealthCheckRequest(), timeout=self._timeout_s)
            except grpc.RpcError:
                return False
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

    @contextmanager
    def _channel(self) -> Iterator[grpc.Channel]:
        channel = grpc.insecure_channel(
            self._address, options=channel_options(GrpcSettings.model_validate({}))
        )
        try:
            yield channel
        finally:
            channel.close()

    @contextmanager
    def _stub(self) -> Iterator[admin_pb2_grpc.AdminStub]:
        with self._channel() as channel:
            try:
                yield admin_pb2_grpc.AdminStub(channel)
            except grpc.RpcError as error:
                raise _as_service_error(error) from error


def _as_service_error(error: grpc.RpcError) -> ServiceError:
    call: object = error
    if isinstance(call, grpc.Call):
        trailers = grpc.aio.Metadata(*(call.trailing_metadata() or ()))
        return from_rpc_error(
            grpc.aio.AioRpcError(call.code(), grpc.aio.Metadata(), trailers, details=call.details())
        )
    return Unavailable("no answer")
