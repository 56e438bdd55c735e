"""Every error that Outrider answers a caller with, and its status on the wire.

ServiceError
├── InvalidArgument        bad input; names the field
├── FailedPrecondition     incompatible peers or state; names the field
├── Overloaded             shed; carries a retry hint
├── Unavailable            no worker, or draining
├── DeadlineExceeded       too late, in the queue or later
├── Cancelled              the caller left
├── DataLoss               KV that failed its checks, under the policy "fail"
├── Unauthenticated        no or unknown credentials
├── PermissionDenied       known, but not allowed
└── Internal               our own fault
"""

from typing import ClassVar


class ServiceError(Exception):
    """Base of all; `status` is the gRPC status name, `http_status` its HTTP counterpart."""

    status: ClassVar[str] = "INTERNAL"
    http_status: ClassVar[int] = 500

    def __init__(self, message: str, *, field: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s


class InvalidArgument(ServiceError):
    """Input that no retry will mend. `field` is its path in the request, such as `sampling.top_p`."""

    status = "INVALID_ARGUMENT"
    http_status = 400

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}", field=field)


class FailedPrecondition(ServiceError):
    """Parts that do not fit together. `field` names what differs."""

    status = "FAILED_PRECONDITION"
    http_status = 412

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}", field=field)


class Overloaded(ServiceError):
    """Shed before any work was spent."""

    status = "RESOURCE_EXHAUSTED"
    http_status = 429

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message, retry_after_s=retry_after_s)


class Unavailable(ServiceError):
    """Nobody can serve this now."""

    status = "UNAVAILABLE"
    http_status = 503


class DeadlineExceeded(ServiceError):
    """The caller's time is over."""

    status = "DEADLINE_EXCEEDED"
    http_status = 504


class Cancelled(ServiceError):
    """The caller left."""

    status = "CANCELLED"
    http_status = 499


class DataLoss(ServiceError):
    """Received KV failed its checks."""

    status = "DATA_LOSS"
    http_status = 500


class Unauthenticated(ServiceError):
    """No or unknown credentials."""

    status = "UNAUTHENTICATED"
    http_status = 401


class PermissionDenied(ServiceError):
    """Known, but not allowed."""

    status = "PERMISSION_DENIED"
    http_status = 403


class Internal(ServiceError):
    """Our own fault."""


BY_STATUS: dict[str, type[ServiceError]] = {
    kind.status: kind
    for kind in (
        InvalidArgument,
        FailedPrecondition,
        Overloaded,
        Unavailable,
        DeadlineExceeded,
        Cancelled,
        DataLoss,
        Unauthenticated,
        PermissionDenied,
        Internal,
    )
}
