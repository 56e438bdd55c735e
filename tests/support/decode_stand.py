"""A decode worker (and prefill workers) with the tiny model on real sockets, and a router's part played by the test."""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc
import grpc.aio

from core.clock import SystemClock
from core.errors import ServiceError
from core.grpc_errors import from_rpc_error
from core.grpc_options import channel_options
from core.grpc_server import make_server
from core.identity import WorkerIdentity, new_epoch
from core.prefix_hash import prompt_digest
from core.records import PrefillPeer, SamplingParams, SpeculationParams, SpeculationReport, TicketClaims
from core.settings import DecodeSettings, EngineSettings, GrpcSettings, HandoffSettings, PrefillSettings
from core.ticket import TicketKeys
from core.tokenizer import Tokenizer
from core.wire import peer_to_wire, report_from_wire, sampling_to_wire, speculation_to_wire
from decode.drafters.registry import required_hidden_layers
from decode.service import add_decode_services
from decode.worker import DecodeWorker
from engine.engine import Engine
from outrider.v1 import admin_pb2_grpc, common_pb2, decode_pb2, decode_pb2_grpc
from prefill.service import add_prefill_services
from prefill.worker import PrefillWorker

KEY = "00112233445566778899aabbccddeeff"
GREEDY = SamplingParams(max_tokens=24, seed=1)
PLAIN = SpeculationParams(drafter="none")


@dataclass(slots=True)
class Answer:
    """What a call brought, choice by choice."""

    token_ids: dict[int, list[int]] = field(default_factory=dict)
    text: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[common_pb2.TokenLogprobs]] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    stop_strings: dict[int, str] = field(default_factory=dict)
    bursts: list[int] = field(default_factory=list)
    report: SpeculationReport | None = None
    finished: decode_pb2.DecodeFinished | None = None
    error: ServiceError | None = None

    @property
    def ids(self) -> list[int]:
        """Of the first choice."""
        return self.token_ids.get(0, [])

    def take(self, event: decode_pb2.DecodeEvent) -> None:
        """One message."""
        if event.HasField("delta"):
            delta = event.delta
            self.token_ids.setdefault(delta.index, []).extend(delta.token_ids)
            self.text[delta.index] = self.text.get(delta.index, "") + delta.text
            self.logprobs.setdefault(delta.index, []).extend(delta.logprobs)
            self.bursts.append(len(delta.token_ids))
            if delta.HasField("finish"):
                self.reasons[delta.index] = common_pb2.FinishReason.Name(delta.finish.reason)
                self.stop_strings[delta.index] = delta.finish.stop_string
        elif event.HasField("finished"):
            self.finished = event.finished
            self.report = report_from_wire(event.finished.report)


@dataclass(slots=True)
class DecodeStand:
    """What runs, and how to ask it."""

    worker: DecodeWorker
    prefill: list[PrefillWorker]
    peers: list[PrefillPeer]
    stub: decode_pb2_grpc.DecodeStub
    admin: admin_pb2_grpc.AdminStub
    tokenizer: Tokenizer
    script: Path
    _ids: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))

    def request(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams = GREEDY,
        speculation: SpeculationParams = PLAIN,
        *,
        committed: Mapping[int, Sequence[int]] | None = None,
        peers: Sequence[PrefillPeer] | None = None,
        fixed: bool | None = None,
        salt: bytes = b"",
        request_id: str | None = None,
        ticket_prompt: Sequence[int] | None = None,
        ticket_lifetime_ms: int = 60_000,
    ) -> decode_pb2.DecodeRequest:
        """As a router would send it."""
        chosen = self.peers if peers is None else list(peers)
        identity = self.worker.identity
        claims = TicketClaims(
            request_id=request_id or f"request-{next(self._ids)}",
            attempt=1,
            tenant="test",
            prompt_digest=prompt_digest(prompt_ids if ticket_prompt is None else ticket_prompt),
            model_revision=self.worker.engine.numerics.model_revision,
            adapter="",
            numerics_class=self.worker.engine.numerics.digest(),
            seed=sampling.seed or 0,
            decode_worker_id=identity.worker_id,
            decode_epoch=identity.epoch,
            prefill_worker_ids=tuple(peer.worker_id for peer in chosen),
            expires_unix_ms=SystemClock().unix_ms() + ticket_lifetime_ms,
            cache_salt=salt,
        )
        return decode_pb2.DecodeRequest(
            ticket=TicketKeys([KEY]).sign(claims),
            token_ids=prompt_ids,
            sampling=sampling_to_wire(sampling),
            speculation=speculation_to_wire(speculation),
            draft_length_fixed=speculation.draft_length is not None if fixed is None else fixed,
            committed=[
                decode_pb2.Committed(index=index, token_ids=ids) for index, ids in (committed or {}).items()
            ],
            prefill_peers=[peer_to_wire(peer) for peer in chosen],
            request_class="chat",
            bad_word_ids=[common_pb2.TokenIds(ids=ids) for ids in sampling.bad_word_ids],
            eos_token_ids=sampling.eos_token_ids,
        )

    async def answer(self, request: decode_pb2.DecodeRequest, timeout_s: float | None = 60.0) -> Answer:
        """The whole answer; an error is in `Answer.error`, behind what came before it."""
        answer = Answer()
        try:
            async for event in self.stub.Generate(request, timeout=timeout_s):
                answer.take(event)
        except grpc.aio.AioRpcError as error:
            answer.error = from_rpc_error(error)
        return answer

    async def ask(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams = GREEDY,
        speculation: SpeculationParams = PLAIN,
        **others: object,
    ) -> Answer:
        """`request` and `answer`; the answer must be without error."""
        answer = await self.answer(self.request(prompt_ids, sampling, speculation, **others))  # type: ignore[arg-type]
        if answer.error is not None:
            raise answer.error
        return answer

    def record(self, prompt_ids: Sequence[int], sampling: SamplingParams, answer: Answer) -> None:
        """Add an answer to the script of the scripted drafters."""
        with self.script.open("a") as file:
            for index, token_ids in answer.token_ids.items():
                entry = {
                    "prompt_digest": prompt_digest(prompt_ids).hex(),
                    "seed": sampling.seed,
                    "temperature": sampling.temperature,
                    "choice": index,
                    "answer": token_ids,
                }
                file.write(json.dumps(entry) + "\n")

    async def idle(self) -> None:
        """Waits until nothing is served any more, then checks that nothing is left."""
        async with asyncio.timeout(20):
            await self.worker.idle()
            while any(_holds(worker) for worker in self.prefill):  # noqa: ASYNC110  # it tells only when asked
                await asyncio.sleep(0.005)
        await self.worker.check()
        assert self.worker.gauges().used_blocks == 0


def _holds(worker: PrefillWorker) -> bool:
    return bool(worker.status().leases or worker.gauges().used_blocks)


@asynccontextmanager
async def decode_stand(
    model: Path,
    script: Path,
    *,
    engine: EngineSettings | None = None,
    decode: DecodeSettings | None = None,
    handoff: HandoffSettings | None = None,
    num_prefill: int = 1,
) -> AsyncIterator[DecodeStand]:
    """Everything started, and everything ended. `script` is what scripted drafters read."""
    decode = decode or DecodeSettings()
    handoff = handoff or HandoffSettings()
    engine = engine or EngineSettings(dtype="float32", num_threads=1, block_size=16, num_blocks=128)
    layers = required_hidden_layers(decode.drafters)
    engine = engine.model_copy(update={"hidden_layers": layers})
    grpc_settings = GrpcSettings()
    tokenizer = Tokenizer.from_directory(model)
    async with AsyncExitStack() as stack:
        prefill: list[PrefillWorker] = []
        peers: list[PrefillPeer] = []
        for number in range(num_prefill):
            identity = WorkerIdentity(f"prefill-{number}", "prefill", new_epoch())
            prefill_engine = Engine.load(model, engine)
            worker = PrefillWorker(
                prefill_engine, PrefillSettings(chunk_tokens=32), handoff, identity, TicketKeys([KEY])
            )
            server = make_server(grpc_settings)
            add_prefill_services(server.server, worker)
            address = await server.listen("127.0.0.1:0")
            worker.identity = replace(identity, address=address)
            await worker.start()
            stack.push_async_callback(worker.close)
            stack.push_async_callback(server.stop, 0.0)
            prefill.append(worker)
            peers.append(PrefillPeer(identity.worker_id, identity.epoch, address))
        identity = WorkerIdentity("decode-0", "decode", new_epoch())
        decode_worker = DecodeWorker(
            Engine.load(model, engine), decode, handoff, identity, tokenizer, TicketKeys([KEY]), grpc_settings
        )
        server = make_server(grpc_settings)
        add_decode_services(server.server, decode_worker)
        address = await server.listen("127.0.0.1:0")
        await decode_worker.start()
        stack.push_async_callback(decode_worker.close)
        stack.push_async_callback(server.stop, 0.0)
        channel = grpc.aio.insecure_channel(address, options=channel_options(grpc_settings))
        stack.push_async_callback(channel.close)
        yield DecodeStand(
            worker=decode_worker,
            prefill=prefill,
            peers=peers,
            stub=decode_pb2_grpc.DecodeStub(channel),
            admin=admin_pb2_grpc.AdminStub(channel),
            tokenizer=tokenizer,
            script=script,
        )
