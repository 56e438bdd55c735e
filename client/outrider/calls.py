"""What the sync and async clients share: one call's request, metadata, deadline and trace, and its errors."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import grpc

from outrider.assembly import Assembly
from outrider.channel import (
    AUTHORIZATION_HEADER,
    FIELD_TRAILER,
    IDEMPOTENCY_HEADER,
    MAX_MESSAGE_BYTES,
    RETRY_TRAILER,
    TENANT_HEADER,
)
from outrider.errors import (
    BY_STATUS,
    InternalError,
    InvalidArgumentError,
    MessageTooLargeError,
    OutriderError,
)
from outrider.requests import GenerateOptions, Prompt, build_request
from outrider.results import DrafterInfo, WorkerInfo
from outrider.tracing import CallTrace
from outrider.v1 import admin_pb2, inference_pb2

ADMIN_TIMEOUT_S = 10.0
_TOO_LARGE = re.compile(r"(Sent|Received) message larger than max")
_NO_SERVER = re.compile("failed to connect|errors? resolving|name resolution|DNS resolution", re.IGNORECASE)
NO_SERVER = "no server answers there"
"""How the message begins where nobody could be reached."""
_HEADER_TEXT = re.compile(r"[\x20-\x7e]*")

Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls, and how long a call may take by default."""

    token: str | None
    tenant: str | None
    timeout_s: float | None

    def metadata(self, idempotency_key: str | None = None) -> Metadata:
        """The headers of a call. Raises InvalidArgumentError for what no header can hold."""
        headers = {
            AUTHORIZATION_HEADER: None if self.token is None else f"Bearer {self.token}",
            TENANT_HEADER: self.tenant,
            IDEMPOTENCY_HEADER: idempotency_key,
        }
        for name, value in headers.items():
            if value is not None and not _HEADER_TEXT.fullmatch(value):
                raise InvalidArgumentError(f"{name}: must be printable ASCII", field=name)
        return tuple((name, value) for name, value in headers.items() if value is not None)


@dataclass(frozen=True, slots=True)
class PreparedCall:
    """Everything that one Generate call needs."""

    request: inference_pb2.GenerateRequest
    metadata: Metadata
    timeout_s: float | None
    trace: CallTrace
    assembly: Assembly


def prepare(
    caller: Caller, prompt: Prompt | None, options: GenerateOptions, merge_deltas: bool = False
) -> PreparedCall:
    """Builds a call. Raises InvalidArgumentError or MessageTooLargeError before anything is sent."""
    request = build_request(prompt, options)
    request.merge_deltas = merge_deltas
    size_bytes = request.ByteSize()
    if size_bytes > MAX_MESSAGE_BYTES:
        raise MessageTooLargeError(
            f"request: {size_bytes} bytes exceed the limit of {MAX_MESSAGE_BYTES}", field="request"
        )
    timeout_s = options.get("timeout_s")
    headers = caller.metadata(options.get("idempotency_key"))
    trace = CallTrace("chat" if request.WhichOneof("prompt") == "chat" else "text_completion")
    return PreparedCall(
        request=request,
        metadata=(*headers, *trace.headers()),
        timeout_s=caller.timeout_s if timeout_s is None else timeout_s,
        trace=trace,
        assembly=Assembly(trace.trace_id),
    )


def error_of(rpc_error: grpc.RpcError) -> OutriderError:
    """The typed error of a failed call."""
    code = rpc_error.code()
    message = rpc_error.details() or code.name
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and _TOO_LARGE.search(message):
        return MessageTooLargeError(message)
    if code is grpc.StatusCode.UNAVAILABLE:
        message = _plain_words(message)
    trailers = _trailers(rpc_error.trailing_metadata())
    retry_ms = trailers.get(RETRY_TRAILER)
    kind = BY_STATUS.get(code.name, InternalError)
    return kind(
        message,
        field=trailers.get(FIELD_TRAILER),
        retry_after_s=float(retry_ms) / 1000 if retry_ms is not None else None,
    )


def _plain_words(message: str) -> str:
    """What gRPC says by itself when it reaches nobody, or loses whom it had reached."""
    if _NO_SERVER.search(message):
        return f"{NO_SERVER}: {message}"
    if message == "Cancelling all calls":
        return "the server shut down before the answer ended"
    return message


def _trailers(metadata: Iterable[Any] | None) -> dict[str, str]:  # pairs; gRPC types them three ways
    return {key: value for key, value in (metadata or ()) if isinstance(value, str)}


def worker_info(status: admin_pb2.WorkerStatus) -> WorkerInfo:
    """A worker's record from the wire."""
    names = (name for name in WorkerInfo.__dataclass_fields__ if name != "drafters")
    return WorkerInfo(**{name: getattr(status, name) for name in names}, drafters=tuple(status.drafters))


def drafter_info(info: admin_pb2.DrafterInfo) -> DrafterInfo:
    """A drafter's record from the wire."""
    return DrafterInfo(info.name, info.max_draft_length, info.max_draft_width, tuple(info.workers))
