"""The router before real prefill and decode workers (tiny model): the promise, seen from the front door."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import grpc.aio
import pytest

from core.grpc_options import channel_options
from core.grpc_server import RpcServer, make_server
from core.identity import WorkerIdentity, new_epoch
from core.records import WorkerRecord
from core.settings import (
    DecodeSettings,
    EngineSettings,
    GrpcSettings,
    HandoffSettings,
    PrefillSettings,
    SecuritySettings,
)
from core.ticket import TicketKeys
from core.tokenizer import Tokenizer
from decode.service import add_decode_services
from decode.worker import DecodeWorker
from engine.engine import Engine
from outrider.v1 import inference_pb2, inference_pb2_grpc
from prefill.service import add_prefill_services
from prefill.worker import PrefillWorker
from router.directory import WorkerDirectory
from router.router import Router
from router.service import RouterService
from router.views import ServedModel
from tests.support.router_stand import FAST, Reply, collect
from tests.support.scripted_decode import TICKET_KEY, FakeRegistry
from tests.support.tiny_model import make_tiny_model
from tests.unit.router.workers import record

pytestmark = pytest.mark.timeout(120)

ENGINE = EngineSettings(dtype="float32", num_threads=1, block_size=16, num_blocks=128)
PROMPT = "the cat sat on the mat and the cat sat on the mat and the "


@dataclass(slots=True)
class Pools:
    """One prefill worker, two decode workers, one router."""

    router: Router
    inference: inference_pb2_grpc.InferenceStub
    registry: FakeRegistry
    decode: list[DecodeWorker]
    servers: list[RpcServer]

    async def lose(self, index: int) -> None:
        """Breaks every call to that decode worker and takes it out of the registry."""
        worker_id = self.decode[index].identity.worker_id
        self.registry.others = [known for known in self.registry.others if known.worker_id != worker_id]
        await self.servers[index].server.stop(None)


def known(identity: WorkerIdentity, engine: Engine, address: str) -> WorkerRecord:
    """What the worker would say of itself."""
    return replace(
        record(identity.worker_id, identity.role, epoch=identity.epoch),
        address=address,
        model_revision=engine.numerics.model_revision,
        numerics_class=engine.numerics.digest(),
        total_blocks=ENGINE.num_blocks,
        block_size=ENGINE.block_size,
        hidden_layers=ENGINE.hidden_layers,
    )


@asynccontextmanager
async def pools(model: Path) -> AsyncIterator[Pools]:
    """Starts and ends it all."""
    settings, tokenizer, keys = GrpcSettings(), Tokenizer.from_directory(model), TicketKeys([TICKET_KEY])
    registry = FakeRegistry()
    decode: list[DecodeWorker] = []
    servers: list[RpcServer] = []
    async with AsyncExitStack() as stack:
        engine = Engine.load(model, ENGINE)
        identity = WorkerIdentity("prefill-0", "prefill", new_epoch())
        prefill = PrefillWorker(engine, PrefillSettings(), HandoffSettings(), identity, keys)
        rpc = make_server(settings)
        add_prefill_services(rpc.server, prefill)
        registry.others.append(known(identity, engine, await rpc.listen("127.0.0.1:0")))
        await prefill.start()
        stack.push_async_callback(prefill.close)
        stack.push_async_callback(rpc.stop, 0.0)
        for index in range(2):
            engine = Engine.load(model, ENGINE)
            identity = WorkerIdentity(f"decode-{index}", "decode", new_epoch())
            worker = DecodeWorker(
                engine, DecodeSettings(), HandoffSettings(), identity, tokenizer, keys, settings
            )
            rpc = make_server(settings)
            add_decode_services(rpc.server, worker)
            registry.others.append(known(identity, engine, await rpc.listen("127.0.0.1:0")))
            await worker.start()
            stack.push_async_callback(worker.close)
            stack.push_async_callback(rpc.stop, 0.0)
            decode.append(worker)
            servers.append(rpc)
        router = Router(
            FAST,
            SecuritySettings(ticket_keys=(TICKET_KEY,)),
            settings,
            WorkerDirectory(registry, FAST),
            tokenizer,
            ServedModel("tiny", engine.numerics.model_revision, tokenizer.vocab_size, max_context=1024),
            WorkerIdentity("router-0", "router", new_epoch()),
        )
        await router.start()
        stack.push_async_callback(router.close)
        rpc = make_server(settings)
        RouterService(router).add_to(rpc.server)
        address = await rpc.listen("127.0.0.1:0")
        stack.push_async_callback(rpc.stop, 0.0)
        channel = await stack.enter_async_context(
            grpc.aio.insecure_channel(address, options=channel_options(settings))
        )
        yield Pools(router, inference_pb2_grpc.InferenceStub(channel), registry, decode, servers)
        router.check()


def asked(drafter: str, temperature: float, max_tokens: int = 40) -> inference_pb2.GenerateRequest:
    """A request whose answer runs over the end token, so that its length is known."""
    message = inference_pb2.GenerateRequest(text=PROMPT)
    message.sampling.max_tokens = max_tokens
    message.sampling.temperature = temperature
    message.sampling.seed = 11
    message.sampling.ignore_eos = True
    message.speculation.drafter = drafter
    message.cache_salt = f"{drafter} {temperature}"
    return message


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
async def test_text_is_the_same_with_every_drafter_and_when_its_worker_is_lost_in_mid_answer(
    model: Path, temperature: float
) -> None:
    async with pools(model) as running:
        plain = await collect(running.inference.Generate(asked("none", temperature)))
        assert len(plain.token_ids[0]) == 40
        for drafter in ("ngram", "auto"):
            reply = await collect(running.inference.Generate(asked(drafter, temperature)))
            assert reply.token_ids == plain.token_ids
            assert reply.text == plain.text
            assert reply.started.drafter == "ngram"
        resumed = await lose_in_mid_answer(running, temperature)
        assert resumed.token_ids == plain.token_ids
        assert resumed.text == plain.text
        assert resumed.finished.usage.completion_tokens == 40
        assert resumed.finished.attempts == 2
        assert running.router.status().counters["worker_load"] == 0


async def lose_in_mid_answer(running: Pools, temperature: float) -> Reply:
    """An answer whose worker is taken away behind its first delta."""
    call = running.inference.Generate(asked("none", temperature))

    async def reading() -> AsyncIterator[inference_pb2.GenerateResponse]:
        lost = False
        async for response in call:
            yield response
            if response.HasField("delta") and not lost:
                lost = True
                (busy,) = [index for index, worker in enumerate(running.decode) if worker.num_live]
                await running.lose(busy)

    return await collect(reading())
