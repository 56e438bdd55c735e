"""A router on a real socket in front of scripted decode workers, and a client channel to it."""

from collections.abc import AsyncIterable, AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import grpc
import grpc.aio

from core.grpc_options import channel_options
from core.grpc_server import make_server
from core.identity import WorkerIdentity, new_epoch
from core.settings import GrpcSettings, RouterSettings, SecuritySettings
from outrider.v1 import admin_pb2_grpc, inference_pb2, inference_pb2_grpc
from router.directory import WorkerDirectory
from router.router import Router
from router.service import RouterService
from router.views import ChatTurn, ServedModel
from tests.support.scripted_decode import TICKET_KEY, FakeRegistry, ScriptedDecode

VOCAB_SIZE = 256
END_ID = 0
MODEL = ServedModel(name="tiny", revision="r1", vocab_size=VOCAB_SIZE, max_context=8192)
FAST = RouterSettings(registry_poll_s=0.05)


class ByteTokenizer:
    """Token id = byte. Satisfies `router.tokenise.PromptTokenizer`."""

    eos_token_ids: tuple[int, ...] = (END_ID,)

    def encode(self, text: str, add_special: bool = False) -> list[int]:
        """Its bytes."""
        return list(text.encode())

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Its text."""
        return bytes(ids).decode(errors="replace")

    def apply_chat_template(self, messages: Sequence[ChatTurn]) -> str:
        """Roles and contents, line by line."""
        return "".join(f"<{turn.role}>{turn.content}\n" for turn in messages) + "<assistant>"


@dataclass(slots=True)
class Stand:
    """Everything that runs."""

    router: Router
    registry: FakeRegistry
    workers: list[ScriptedDecode]
    channel: grpc.aio.Channel
    inference: inference_pb2_grpc.InferenceStub
    admin: admin_pb2_grpc.AdminStub
    address: str
    stack: AsyncExitStack

    async def add_worker(self, worker_id: str) -> ScriptedDecode:
        """Starts a further worker, or a further life of one, and has the registry list it."""
        worker = await self.stack.enter_async_context(ScriptedDecode(worker_id))
        self.registry.workers[worker_id] = worker
        self.workers.append(worker)
        return worker

    async def workers_running(self, count: int) -> None:
        """Waits until the workers together run `count` requests."""
        while sum(worker.running for worker in self.workers) < count:
            await self.router.directory.changed(1.0)

    async def idle(self) -> None:
        """Waits until the workers hold nothing and the router has noticed the end of every request."""
        for worker in self.workers:
            await worker.idle.wait()
        while self.router.status().tasks:
            await self.router.directory.changed(1.0)


@asynccontextmanager
async def router_stand(
    num_workers: int = 1,
    settings: RouterSettings = FAST,
    grpc_settings: GrpcSettings | None = None,
    model: ServedModel = MODEL,
) -> AsyncIterator[Stand]:
    """Starts it all on loopback, ends it all."""
    options = grpc_settings or GrpcSettings()
    async with AsyncExitStack() as stack:
        registry = FakeRegistry()
        workers: list[ScriptedDecode] = []
        for index in range(num_workers):
            worker = await stack.enter_async_context(ScriptedDecode(f"decode-{index}", options))
            registry.workers[worker.worker_id] = worker
            worker.total_blocks = model.max_context // 16
            workers.append(worker)
        router = Router(
            settings,
            SecuritySettings(ticket_keys=(TICKET_KEY,)),
            options,
            WorkerDirectory(registry, settings),
            ByteTokenizer(),
            model,
            WorkerIdentity("router-0", "router", new_epoch()),
        )
        await router.start()
        stack.push_async_callback(router.close)
        rpc = make_server(options)
        RouterService(router).add_to(rpc.server)
        address = await rpc.listen("127.0.0.1:0")
        stack.push_async_callback(rpc.stop, 0.0)
        channel = await stack.enter_async_context(
            grpc.aio.insecure_channel(address, options=channel_options(options))
        )
        inference = inference_pb2_grpc.InferenceStub(channel)
        admin = admin_pb2_grpc.AdminStub(channel)
        yield Stand(router, registry, workers, channel, inference, admin, address, stack)
        router.check()


@dataclass(slots=True)
class Reply:
    """A whole answer as a client sees it."""

    started: inference_pb2.Started
    token_ids: dict[int, list[int]]
    text: dict[int, str]
    finished: inference_pb2.Finished


def request(
    prompt: str = "hello", max_tokens: int = 30, seed: int | None = 7
) -> inference_pb2.GenerateRequest:
    """A request in plain text."""
    message = inference_pb2.GenerateRequest(text=prompt)
    message.sampling.max_tokens = max_tokens
    if seed is not None:
        message.sampling.seed = seed
    return message


async def collect(call: AsyncIterable[inference_pb2.GenerateResponse]) -> Reply:
    """Reads a call to its end, checking the order of its messages."""
    started: inference_pb2.Started | None = None
    finished: inference_pb2.Finished | None = None
    ids: dict[int, list[int]] = {}
    text: dict[int, str] = {}
    async for response in call:
        assert finished is None, "a message behind the last one"
        if response.HasField("started"):
            assert started is None, "two first messages"
            started = response.started
        elif response.HasField("delta"):
            assert started is not None, "a delta before the first message"
            ids.setdefault(response.delta.index, []).extend(response.delta.token_ids)
            text[response.delta.index] = text.get(response.delta.index, "") + response.delta.text
        else:
            finished = response.finished
    assert started is not None
    assert finished is not None
    return Reply(started, ids, text, finished)
