"""The asyncio client. One client belongs to one event loop."""

import asyncio
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Self, Unpack

import grpc
import grpc.aio

from outrider.calls import ADMIN_TIMEOUT_S, Caller, PreparedCall, drafter_info, error_of, prepare, worker_info
from outrider.channel import CHANNEL_OPTIONS
from outrider.errors import CancelledError, OutriderError
from outrider.requests import GenerateOptions, Prompt
from outrider.results import Delta, DrafterInfo, Result, WorkerInfo
from outrider.v1 import admin_pb2, admin_pb2_grpc, inference_pb2_grpc


class AsyncStream:
    """One answer as it is written. Iterate for deltas; `result` is there after the last one.

    Leaving the loop, `aclose`, leaving the `async with` block or cancelling the task cancels the call.
    May be iterated once.
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

    def __aiter__(self) -> AsyncIterator[Delta]:
        """Deltas as they come. Raises an OutriderError that holds what had arrived."""
        return _Deltas(self)

    async def aclose(self) -> None:
        """Cancels the call if it still runs."""
        self.cancel()

    def cancel(self) -> None:
        """As `aclose`, without waiting."""
        self._call.cancel()
        self._prepared.trace.leave()

    async def __aenter__(self) -> Self:
        """Returns the stream."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Closes."""
        self.cancel()

    def __del__(self) -> None:
        """A stream that is dropped is left."""
        self.cancel()

    async def next_delta(self) -> Delta | None:
        """The next delta; None at the end. For iteration only."""
        try:
            while (event := await self._call.read()) is not grpc.aio.EOF:
                delta = self._prepared.assembly.add(event)
                if delta is not None:
                    return delta
            self._prepared.trace.finish(self._prepared.assembly.whole())
        except grpc.RpcError as error:
            raise self._failed(error_of(error)) from error
        except OutriderError as error:
            self._failed(error)
            raise
        except asyncio.CancelledError as error:
            self.cancel()
            if _task_is_cancelled():
                raise
            raise self._failed(CancelledError("the call was cancelled")) from error
        return None

    def _failed(self, error: OutriderError) -> OutriderError:
        self._prepared.trace.fail(error)
        self._call.cancel()
        return self._prepared.assembly.attach(error)


class _Deltas:
    """Iterates a stream; dropping it (`break`, an exception) cancels the call at once."""

    def __init__(self, stream: AsyncStream) -> None:
        self._stream = stream

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        delta = await self._stream.next_delta()
        if delta is None:
            raise StopAsyncIteration
        return delta

    def __del__(self) -> None:
        self._stream.cancel()


class AsyncClient:
    """A connection to a router at `address` (host:port); see `Client` for the parameters."""

    def __init__(
        self,
        address: str,
        *,
        token: str | None = None,
        tenant: str | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self._address = address
        self._caller = Caller(token, tenant, timeout_s)
        self._caller.metadata()
        self._open_channel: grpc.aio.Channel | None = None

    async def generate(self, prompt: Prompt | None = None, **options: Unpack[GenerateOptions]) -> Result:
        """The whole answer to `prompt` (text as it is, or token ids) or to `messages`; see GenerateOptions."""
        stream = self._call(prompt, options, merge_deltas=True)
        async for _ in stream:
            pass
        return stream.result

    def stream(self, prompt: Prompt | None = None, **options: Unpack[GenerateOptions]) -> AsyncStream:
        """As `generate`, delta by delta. The call starts at once; needs a running event loop."""
        return self._call(prompt, options, merge_deltas=False)

    def _call(self, prompt: Prompt | None, options: GenerateOptions, merge_deltas: bool) -> AsyncStream:
        prepared = prepare(self._caller, prompt, options, merge_deltas)
        stub = inference_pb2_grpc.InferenceStub(self._channel())
        call = stub.Generate(prepared.request, metadata=prepared.metadata, timeout=prepared.timeout_s)
        return AsyncStream(call, prepared)

    async def workers(self) -> tuple[WorkerInfo, ...]:
        """Every worker that the router knows."""
        stub = admin_pb2_grpc.AdminStub(self._channel())
        reply = await self._ask(stub.ListWorkers, admin_pb2.ListWorkersRequest())
        return tuple(worker_info(status) for status in reply.workers)

    async def drafters(self) -> tuple[DrafterInfo, ...]:
        """Every drafter that a request may name."""
        stub = admin_pb2_grpc.AdminStub(self._channel())
        reply = await self._ask(stub.ListDrafters, admin_pb2.ListDraftersRequest())
        return tuple(drafter_info(info) for info in reply.drafters)

    async def aclose(self) -> None:
        """Closes the channel; running calls end with CancelledError."""
        if self._open_channel is not None:
            await self._open_channel.close()

    async def __aenter__(self) -> Self:
        """Returns the client."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Closes."""
        await self.aclose()

    def _channel(self) -> grpc.aio.Channel:
        if self._open_channel is None:
            self._open_channel = grpc.aio.insecure_channel(self._address, options=CHANNEL_OPTIONS)
        return self._open_channel

    async def _ask(self, method: Any, request: object) -> Any:
        try:
            return await method(
                request,
                metadata=self._caller.metadata(),
                timeout=self._caller.timeout_s or ADMIN_TIMEOUT_S,
            )
        except grpc.RpcError as error:
            raise error_of(error) from error


def _task_is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
