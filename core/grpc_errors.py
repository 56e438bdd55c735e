"""From our errors to a gRPC status with trailers, and back."""

from collections.abc import Sequence

import grpc

from core.errors import BY_STATUS, FailedPrecondition, Internal, InvalidArgument, Overloaded, ServiceError

FIELD_TRAILER = "outrider-error-field"
RETRY_TRAILER = "outrider-retry-after-ms"

_MESSAGE_CHARACTERS = 1000
"""Twelve bytes each at most, as they are sent."""
_CODES = {code.name: code for code in grpc.StatusCode}

Metadata = Sequence[tuple[str, str | bytes]]


def status_code(error: ServiceError) -> grpc.StatusCode:
    """The gRPC status of an error."""
    return _CODES[error.status]


def error_trailers(error: ServiceError) -> tuple[tuple[str, str], ...]:
    """The trailers that carry an error's facts."""
    trailers: list[tuple[str, str]] = []
    if error.field is not None:
        trailers.append((FIELD_TRAILER, error.field))
    if error.retry_after_s is not None:
        trailers.append((RETRY_TRAILER, str(int(error.retry_after_s * 1000))))
    return tuple(trailers)


async def abort(context: "grpc.aio.ServicerContext[object, object]", error: ServiceError) -> None:
    """End a call with an error's status. Does not return: grpc raises out of it."""
    await context.abort(status_code(error), _shortened(error.message), error_trailers(error))


def from_rpc_error(error: grpc.aio.AioRpcError) -> ServiceError:
    """The error that a peer of ours answered with."""
    trailers = dict(error.trailing_metadata() or ())
    field = _text(trailers.get(FIELD_TRAILER))
    message = error.details() or error.code().name
    kind = BY_STATUS.get(error.code().name, Internal)
    if issubclass(kind, InvalidArgument | FailedPrecondition):
        prefix = f"{field}: "
        return kind(field or "request", message.removeprefix(prefix))
    if kind is Overloaded:
        retry_ms = _text(trailers.get(RETRY_TRAILER))
        return Overloaded(message, float(retry_ms) / 1000 if retry_ms else 1.0)
    return kind(message)


def _shortened(message: str) -> str:
    """Its beginning and end where it repeats a long value: a client drops answers with more than 16 KiB of trailers."""
    if len(message) <= _MESSAGE_CHARACTERS:
        return message
    half = _MESSAGE_CHARACTERS // 2
    return f"{message[:half]} … {message[-half:]}"


def _text(value: str | bytes | None) -> str | None:
    return value.decode() if isinstance(value, bytes) else value
