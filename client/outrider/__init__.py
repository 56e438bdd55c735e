"""Outrider's client: generate and stream text, with the evidence of how it was drafted.

from outrider import Client
with Client("127.0.0.1:50051") as client:
    result = client.generate(messages=[{"role": "user", "content": "Hello"}], max_tokens=64)
    print(result.text, result.speculation.acceptance_rate)
"""

from outrider.async_client import AsyncClient, AsyncStream
from outrider.client import Client, Stream
from outrider.errors import (
    CancelledError,
    DataLossError,
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    MessageTooLargeError,
    OutriderError,
    OverloadedError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnavailableError,
)
from outrider.requests import GenerateOptions, Message
from outrider.results import (
    Choice,
    Delta,
    DrafterInfo,
    Result,
    Speculation,
    Timing,
    TokenLogprobs,
    Usage,
    WorkerInfo,
)

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "CancelledError",
    "Choice",
    "Client",
    "DataLossError",
    "DeadlineExceededError",
    "Delta",
    "DrafterInfo",
    "FailedPreconditionError",
    "GenerateOptions",
    "InternalError",
    "InvalidArgumentError",
    "Message",
    "MessageTooLargeError",
    "OutriderError",
    "OverloadedError",
    "PermissionDeniedError",
    "Result",
    "Speculation",
    "Stream",
    "Timing",
    "TokenLogprobs",
    "UnauthenticatedError",
    "UnavailableError",
    "Usage",
    "WorkerInfo",
]
