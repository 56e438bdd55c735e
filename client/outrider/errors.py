"""Every error that the client raises for a call.

OutriderError
├── InvalidArgumentError      bad input; `field` names it (also raised before anything is sent)
├── FailedPreconditionError   parts of the deployment that do not fit together; `field` names what differs
├── OverloadedError           shed; retry after `retry_after_s`
├── UnavailableError          no worker, draining, or no server at the address
├── DeadlineExceededError     `timeout_s` is over
├── CancelledError            the call was cancelled, here or there
├── DataLossError             KV that failed its checks, under the policy "fail"
├── MessageTooLargeError      a message above the channel's limit
├── UnauthenticatedError      no or unknown token
├── PermissionDeniedError     known, but not allowed
└── InternalError             a fault of the server, or an answer that breaks the protocol
"""

from typing import ClassVar


class OutriderError(Exception):
    """Base of all. What had arrived before the error is in `text` and `token_ids` (of choice 0).

    With a fixed seed, sending `token_ids` as `resume_token_ids` continues the answer where it broke.
    """

    status: ClassVar[str] = "UNKNOWN"

    def __init__(self, message: str, *, field: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s
        self.token_ids: tuple[int, ...] = ()
        self.text = ""
        self.seed: int | None = None
        self.request_id: str | None = None
        self.trace_id: str | None = None


class InvalidArgumentError(OutriderError):
    """Input that no retry will mend. `field` is its path in the request, such as `sampling.top_p`."""

    status = "INVALID_ARGUMENT"


class FailedPreconditionError(OutriderError):
    """Parts that do not fit together. `field` names what differs."""

    status = "FAILED_PRECONDITION"


class OverloadedError(OutriderError):
    """Shed before any work was spent. `retry_after_s` says when to try again."""

    status = "RESOURCE_EXHAUSTED"


class MessageTooLargeError(OutriderError):
    """A request or reply above the channel's limit. The channel stays usable."""

    status = "RESOURCE_EXHAUSTED"


class UnavailableError(OutriderError):
    """Nobody can serve this now."""

    status = "UNAVAILABLE"


class DeadlineExceededError(OutriderError):
    """The call's time is over."""

    status = "DEADLINE_EXCEEDED"


class CancelledError(OutriderError):
    """The call was cancelled."""

    status = "CANCELLED"


class DataLossError(OutriderError):
    """Received KV failed its checks."""

    status = "DATA_LOSS"


class UnauthenticatedError(OutriderError):
    """No or unknown token."""

    status = "UNAUTHENTICATED"


class PermissionDeniedError(OutriderError):
    """Known, but not allowed."""

    status = "PERMISSION_DENIED"


class InternalError(OutriderError):
    """A fault of the server, or an answer that breaks the protocol."""

    status = "INTERNAL"


BY_STATUS: dict[str, type[OutriderError]] = {
    kind.status: kind
    for kind in (
        InvalidArgumentError,
        FailedPreconditionError,
        OverloadedError,
        UnavailableError,
        DeadlineExceededError,
        CancelledError,
        DataLossError,
        UnauthenticatedError,
        PermissionDeniedError,
        InternalError,
    )
}
"""The error of each gRPC status; any other status is an InternalError."""
