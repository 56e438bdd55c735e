"""The blocking client. Thread-safe: calls may run at once on one client."""

from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self, Unpack

import grpc

from outrider.calls import ADMIN_TIMEOUT_S, Caller, PreparedCall, drafter_info, error_of, prepare, worker_info
from outrider.channel import CHANNEL_OPTIONS
from outrider.errors import OutriderError
from outrider.requests import GenerateOptions, Prompt
from outrider.results import Delta, DrafterInfo, Result, WorkerInfo
from outrider.v1 import admin_pb2, admin_pb2_grpc, inference_pb2_grpc


class Stream:
    """One answer as it is written. Iterate for deltas; `result` is there after the last one.

    Leaving the loop, `close`, or leaving the `with` block cancels the call. May be iterated once.
    """

    def __init__(self, call: Any, prepared: PreparedCall) -> None:
        """`call` is gRPC's unary-stream call (untyped by gRPC)."""
        self._call = call
        self._prepared = prepared

    @property
    def trace_id(self) -> str:
        """32 hex digits; known from the start."""
        return self._prepared.trace.trace_id

    @property
    def result(self) -> Result:
        """The whole answer. Raises RuntimeError before the stream has ended."""
        result = self._prepared.assembly.result
        if result is None:
            raise RuntimeError("the stream has not ended; iterate it to its end first")
        return result

    def __iter__(self) -> Iterator[Delta]:
        """Deltas as they come. Raises an OutriderError that holds what had arrived."""
        try:
            for event in self._call:
                delta = self._prepared.assembly.add(event)
                if delta is not None:
                    yield delta
            self._prepared.trace.finish(self._prepared.assembly.whole())
        except grpc.RpcError as error:
            raise self._failed(error_of(error)) from error
        except OutriderError as error:
            self._failed(error)
            raise
        finally:
            self.close()

    def close(self) -> None:
        """Cancels the call if it still runs."""
        self._call.cancel()
        self._prepared.trace.leave()

    def __enter__(self) -> Self:
        """Returns the stream."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Closes."""
        self.close()

    def __del__(self) -> None:
        """A stream that is dropped is left."""
        self.close()

    def _failed(self, error: OutriderError) -> OutriderError:
        self._prepared.trace.fail(error)
        return self._prepared.assembly.attach(error)


class Client:
    """A connection to a router at `address` (host:port).

    `token` is sent as bearer token, `tenant` names whose request it is, `timeout_s` bounds each call that does
    not say otherwise (None: no bound).
    """

    def __init__(
        self,
        address: str,
        *,
        token: str | None = None,
        tenant: str | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self._caller = Caller(token, tenant, timeout_s)
        self._caller.metadata()
        self._channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._inference = inference_pb2_grpc.InferenceStub(self._channel)
        self._admin = admin_pb2_grpc.AdminStub(self._channel)

    def generate(self, prompt: Prompt | None = None, **options: Unpack[GenerateOptions]) -> Result:
        """The whole answer to `prompt` (text as it is, or token ids) or to `messages`; see GenerateOptions."""
        stream = self._call(prompt, options, merge_deltas=True)
        for _ in stream:
            pass
        return stream.result

    def stream(self, prompt: Prompt | None = None, **options: Unpack[GenerateOptions]) -> Stream:
        """As `generate`, delta by delta. The call starts at once."""
        return self._call(prompt, options, merge_deltas=False)

    def _call(self, prompt: Prompt | None, options: GenerateOptions, merge_deltas: bool) -> Stream:
        prepared = prepare(self._caller, prompt, options, merge_deltas)
        call = self._inference.Generate(
            prepared.request, metadata=prepared.metadata, timeout=prepared.timeout_s
        )
        return Stream(call, prepared)

    def workers(self) -> tuple[WorkerInfo, ...]:
        """Every worker that the router knows."""
        reply = self._ask(self._admin.ListWorkers, admin_pb2.ListWorkersRequest())
        return tuple(worker_info(status) for status in reply.workers)

    def drafters(self) -> tuple[DrafterInfo, ...]:
        """Every drafter that a request may name."""
        reply = self._ask(self._admin.ListDrafters, admin_pb2.ListDraftersRequest())
        return tuple(drafter_info(info) for info in reply.drafters)

    def close(self) -> None:
        """Closes the channel; running calls end with CancelledError."""
        self._channel.close()

    def __enter__(self) -> Self:
        """Returns the client."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Closes."""
        self.close()

    def _ask(self, method: Any, request: object) -> Any:
        try:
            return method(
                request,
                metadata=self._caller.metadata(),
                timeout=self._caller.timeout_s or ADMIN_TIMEOUT_S,
            )
        except grpc.RpcError as error:
            raise error_of(error) from error
