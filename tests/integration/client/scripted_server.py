"""A router of scripted answers on a real socket, in a thread of its own. The prompt's text names the script."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio

from core.errors import BY_STATUS, FailedPrecondition, InvalidArgument, Overloaded, ServiceError
from core.grpc_errors import abort
from core.grpc_options import server_options
from core.settings import GrpcSettings
from outrider.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    common_pb2,
    inference_pb2,
    inference_pb2_grpc,
)

Response = inference_pb2.GenerateResponse
Context = Any
"""gRPC's servicer context, which its stubs leave untyped."""

SEED = 1234567890123


def started(**fields: Any) -> Response:
    """The first message."""
    defaults = {
        "request_id": "request-1",
        "seed": SEED,
        "drafter": "ngram",
        "request_class": "chat",
        "numerics_class": "class-1",
        "model": "scripted",
    }
    return Response(started=inference_pb2.Started(**{**defaults, **fields}))


def delta(text: str, *ids: int, index: int = 0) -> Response:
    """Some text and ids of one choice."""
    return Response(delta=inference_pb2.Delta(text=text, token_ids=ids, index=index))


def finished(
    num_choices: int = 1, reason: common_pb2.FinishReason = common_pb2.FINISH_REASON_LENGTH
) -> Response:
    """The last message: 3 steps that offered 4 drafts and accepted 3 emit 6 tokens."""
    return Response(
        finished=inference_pb2.Finished(
            choices=[common_pb2.ChoiceFinish(index=index, reason=reason) for index in range(num_choices)],
            usage=common_pb2.Usage(prompt_tokens=5, completion_tokens=7, cached_prompt_tokens=2),
            speculation=common_pb2.SpeculationReport(
                drafter="ngram",
                request_class="chat",
                steps=3,
                proposed_nodes=4,
                accepted_tokens=3,
                step_tokens=6,
                draft_length_sum=4,
                position_offered=[3, 1],
                position_accepted=[2, 1],
            ),
            timing=common_pb2.Timing(time_to_first_token_s=0.25, total_s=1.5),
            attempts=2,
        )
    )


class ScriptedRouter(inference_pb2_grpc.InferenceServicer, admin_pb2_grpc.AdminServicer):
    """Answers as the prompt's text says, and remembers what it was asked."""

    def __init__(self) -> None:
        self.requests: list[inference_pb2.GenerateRequest] = []
        self.metadata: list[dict[str, str]] = []
        self.deadlines_s: list[float | None] = []
        self.cancelled = threading.Event()
        self.running = threading.Event()

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[Response]:
        """See `Inference.Generate`."""
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        self.deadlines_s.append(context.time_remaining())
        name, _, argument = request.text.partition(":")
        script: Callable[[str, Context], AsyncIterator[Response]] = getattr(self, f"_{name or 'answer'}")
        try:
            async for response in script(argument, context):
                yield response
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def ListWorkers(self, request: object, context: Context) -> admin_pb2.ListWorkersResponse:
        """See `Admin.ListWorkers`."""
        self.metadata.append(dict(context.invocation_metadata()))
        status = admin_pb2.WorkerStatus(
            worker_id="decode-0", role="decode", ready=True, free_blocks=7, drafters=["none", "ngram"]
        )
        return admin_pb2.ListWorkersResponse(workers=[status])

    async def ListDrafters(self, request: object, context: Context) -> admin_pb2.ListDraftersResponse:
        """See `Admin.ListDrafters`."""
        info = admin_pb2.DrafterInfo(
            name="ngram", max_draft_length=16, max_draft_width=8, workers=["decode-0"]
        )
        return admin_pb2.ListDraftersResponse(drafters=[info])

    async def _answer(self, argument: str, context: Context) -> AsyncIterator[Response]:
        yield started()
        yield delta("Hel", 10)
        yield delta("lo", 11, 12)
        yield finished()

    async def _typical(self, argument: str, context: Context) -> AsyncIterator[Response]:
        yield started(verification=common_pb2.VERIFICATION_TYPICAL, approximate=True)
        yield delta("Hello", 10, 11, 12)
        yield finished()

    async def _two(self, argument: str, context: Context) -> AsyncIterator[Response]:
        yield started()
        yield delta("b", 2, index=1)
        yield delta("a", 1)
        yield delta("bb", 22, index=1)
        yield finished(2, common_pb2.FINISH_REASON_STOP)

    async def _logprobs(self, argument: str, context: Context) -> AsyncIterator[Response]:
        chosen = common_pb2.TokenLogprob(token_id=10, logprob=-0.5)
        entry = common_pb2.TokenLogprobs(chosen=chosen, top=[chosen])
        yield started()
        yield Response(delta=inference_pb2.Delta(text="x", token_ids=[10], logprobs=[entry]))
        yield finished()

    async def _hang(self, argument: str, context: Context) -> AsyncIterator[Response]:
        yield started()
        yield delta("Hel", 10)
        self.running.set()
        await asyncio.Event().wait()

    async def _quiet(self, argument: str, context: Context) -> AsyncIterator[Response]:
        yield started()
        await asyncio.sleep(float(argument))
        yield delta("Hello", 10)
        yield finished()

    async def _fail(self, argument: str, context: Context) -> AsyncIterator[Response]:
        yield started()
        yield delta("Hel", 10)
        await abort(context, service_error(argument))

    async def _status(self, argument: str, context: Context) -> AsyncIterator[Response]:
        await context.abort(getattr(grpc.StatusCode, argument), "told to")
        yield started()

    async def _unfinished(self, argument: str, context: Context) -> AsyncIterator[Response]:
        yield started()
        yield delta("Hel", 10)

    async def _unordered(self, argument: str, context: Context) -> AsyncIterator[Response]:
        yield delta("Hel", 10)

    async def _large(self, argument: str, context: Context) -> AsyncIterator[Response]:
        yield started()
        yield delta("x" * int(argument), 10)
        yield finished()


def service_error(status: str) -> ServiceError:
    """An error of ours of each kind, with the facts that it carries."""
    kind = BY_STATUS[status]
    if issubclass(kind, InvalidArgument | FailedPrecondition):
        return kind("sampling.top_p", "told to")
    return Overloaded("told to", retry_after_s=2.5) if kind is Overloaded else kind("told to")


class ScriptedServer:
    """Starts the router on a free loopback port; a context manager."""

    def __init__(self, settings: GrpcSettings | None = None) -> None:
        self.router = ScriptedRouter()
        self.address = ""
        self._settings = settings if settings is not None else GrpcSettings()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._server: grpc.aio.Server | None = None

    def __enter__(self) -> "ScriptedServer":
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(timeout=10)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(timeout=10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        self._loop.close()

    async def _start(self) -> None:
        self._server = grpc.aio.server(options=server_options(self._settings))
        inference_pb2_grpc.add_InferenceServicer_to_server(self.router, self._server)
        admin_pb2_grpc.add_AdminServicer_to_server(self.router, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()

    async def _stop(self) -> None:
        if self._server is not None:
            await self._server.stop(0)


def as_json(value: object) -> str:
    """Proof that a value is made of JSON types."""
    return json.dumps(value, allow_nan=False)
