"""A decode worker without a model: a real gRPC server whose answers and faults are scripted by the test."""

import asyncio
import hashlib
from collections import deque
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Literal, Self, TypeAlias

import grpc
import grpc.aio

from core.clock import SystemClock
from core.errors import Overloaded, Unavailable
from core.grpc_errors import error_trailers
from core.grpc_options import server_options
from core.identity import new_epoch
from core.records import TicketClaims, WorkerRecord
from core.settings import GrpcSettings
from core.ticket import TicketKeys
from outrider.v1 import admin_pb2, admin_pb2_grpc, common_pb2, decode_pb2, decode_pb2_grpc

TICKET_KEY = "00112233445566778899aabbccddeeff"
BURST = 3
"""Tokens that one delta of a scripted worker brings."""

Context: TypeAlias = "grpc.aio.ServicerContext[object, object]"
FaultKind = Literal["unavailable", "die", "end_early", "overloaded", "internal"]


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong in one call, once `after_tokens` tokens of it have been sent."""

    kind: FaultKind
    after_tokens: int = 0


def answer_ids(seed: int, choice: int, prompt_tokens: int, max_tokens: int) -> list[int]:
    """The answer that every scripted worker gives, whatever its attempt: printable bytes."""
    ids: list[int] = []
    for position in range(prompt_tokens, prompt_tokens + max_tokens):
        digest = hashlib.blake2b(f"{seed}/{choice}/{position}".encode(), digest_size=2).digest()
        ids.append(33 + int.from_bytes(digest, "little") % 90)
    return ids


class ScriptedDecode(decode_pb2_grpc.DecodeServicer, admin_pb2_grpc.AdminServicer):
    """One life of a scripted worker. Keeps what it was asked; `faults` are used up call by call.

    `service_s`: how long an answer takes before its first token. `text_bytes`: padding of each delta's text.
    `drafters`: what it says that it hosts; `auto` becomes the last one that it is offered.
    """

    def __init__(self, worker_id: str, grpc_settings: GrpcSettings | None = None) -> None:
        self.worker_id = worker_id
        self.epoch = new_epoch()
        self.faults: deque[Fault] = deque()
        self.fired: list[Fault] = []
        self.requests: list[decode_pb2.DecodeRequest] = []
        self.claims: list[TicketClaims] = []
        self.metadata: list[dict[str, str | bytes]] = []
        self.remaining_s: list[float | None] = []
        self.running = 0
        self.most_running = 0
        self.cancelled = 0
        self.drained_s: list[float] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.idle = asyncio.Event()
        self.idle.set()
        self.address = ""
        self.alive = True
        self.total_blocks = 1024
        self.drafters: tuple[str, ...] = ("none", "ngram")
        self.service_s = 0.0
        self.text_bytes = 0
        self.sent_deltas = 0
        self._server = grpc.aio.server(options=server_options(grpc_settings or GrpcSettings()))
        self._keys = TicketKeys((TICKET_KEY,))

    async def __aenter__(self) -> Self:
        decode_pb2_grpc.add_DecodeServicer_to_server(self, self._server)
        admin_pb2_grpc.add_AdminServicer_to_server(self, self._server)
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        self.address = f"127.0.0.1:{port}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._server.stop(None)

    async def stop(self) -> None:
        """Ends it as a killed process would: calls break, the port closes, no more heartbeats."""
        self.alive = False
        await self._server.stop(None)

    def record(self) -> WorkerRecord:
        """What it would publish in the registry."""
        return WorkerRecord(
            worker_id=self.worker_id,
            role="decode",
            address=self.address,
            epoch=self.epoch,
            model="tiny",
            model_revision="r1",
            numerics_class="class-a",
            ready=True,
            draining=False,
            running=self.running,
            waiting=0,
            free_blocks=self.total_blocks,
            total_blocks=self.total_blocks,
            block_size=16,
            max_context=self.total_blocks * 16,
            drafters=self.drafters,
            max_draft_length=16,
            reported_unix_ms=SystemClock().unix_ms(),
        )

    async def Generate(self, request: decode_pb2.DecodeRequest, context: Context) -> None:
        """`Decode.Generate`: deltas of BURST tokens, each when the gate is open."""
        self.requests.append(request)
        self.claims.append(self._keys.verify(request.ticket, SystemClock().unix_ms()))
        self.metadata.append(dict(context.invocation_metadata() or ()))
        self.remaining_s.append(context.time_remaining())
        fault = self.faults.popleft() if self.faults else None
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        self.idle.clear()
        try:
            await self._answer(request, context, fault)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
            if self.running == 0:
                self.idle.set()

    async def _answer(
        self,
        request: decode_pb2.DecodeRequest,
        context: Context,
        fault: Fault | None,
    ) -> None:
        sent = 0
        if fault is not None and fault.after_tokens == 0 and await self._fail(fault, context):
            return
        drafter = [request.speculation.drafter, *request.auto_drafters][-1]
        await context.write(decode_pb2.DecodeEvent(started=decode_pb2.DecodeStarted(drafter=drafter)))
        await asyncio.sleep(self.service_s)
        report = common_pb2.SpeculationReport(drafter=drafter)
        completion = 0
        for choice in range(request.sampling.n):
            done = next(
                (entry for entry in request.committed if entry.index == choice), decode_pb2.Committed()
            )
            ids = answer_ids(
                request.sampling.seed, choice, len(request.token_ids), request.sampling.max_tokens
            )
            completion += len(ids)
            if done.finished:
                continue
            assert ids[: len(done.token_ids)] == list(done.token_ids), "another answer was committed"
            for start in range(len(done.token_ids), len(ids), BURST):
                burst = ids[start : start + BURST]
                if fault is not None and sent >= fault.after_tokens and await self._fail(fault, context):
                    return
                await self.gate.wait()
                report.steps += 1
                report.step_tokens += len(burst)
                await context.write(self._delta(choice, burst, start + BURST >= len(ids), report))
                sent += len(burst)
                self.sent_deltas += 1
        if fault is not None and await self._fail(fault, context):
            return
        usage = common_pb2.Usage(prompt_tokens=len(request.token_ids), completion_tokens=completion)
        finished = decode_pb2.DecodeFinished(usage=usage, report=report, choices=self._finishes(request))
        await context.write(decode_pb2.DecodeEvent(finished=finished))

    def _delta(
        self, choice: int, burst: list[int], last: bool, report: common_pb2.SpeculationReport
    ) -> decode_pb2.DecodeEvent:
        text = bytes(burst).decode() + "x" * self.text_bytes
        delta = decode_pb2.DecodeDelta(index=choice, text=text, token_ids=burst, report=report)
        if last:
            delta.finish.index = choice
            delta.finish.reason = common_pb2.FINISH_REASON_LENGTH
        return decode_pb2.DecodeEvent(delta=delta)

    def _finishes(self, request: decode_pb2.DecodeRequest) -> list[common_pb2.ChoiceFinish]:
        length = common_pb2.FINISH_REASON_LENGTH
        return [common_pb2.ChoiceFinish(index=index, reason=length) for index in range(request.sampling.n)]

    async def _fail(self, fault: Fault, context: Context) -> bool:
        """Lets the fault happen. True: the handler just returns."""
        self.fired.append(fault)
        if fault.kind == "unavailable":
            await context.abort(grpc.StatusCode.UNAVAILABLE, "scripted")
        if fault.kind == "internal":
            await context.abort(grpc.StatusCode.INTERNAL, "scripted")
        if fault.kind == "overloaded":
            error = Overloaded("scripted", 0.25)
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, error.message, error_trailers(error))
        if fault.kind == "die":
            self.alive = False
            self._death = asyncio.create_task(self._server.stop(None))
            await asyncio.Event().wait()
        return True

    async def Status(self, _: admin_pb2.StatusRequest, context: object) -> admin_pb2.WorkerStatus:
        """`Admin.Status`."""
        return admin_pb2.WorkerStatus(
            worker_id=self.worker_id, role="decode", epoch=self.epoch, ready=True, running=self.running
        )

    async def Drain(self, request: admin_pb2.DrainRequest, context: object) -> admin_pb2.DrainResponse:
        """`Admin.Drain`."""
        self.drained_s.append(request.grace_s)
        return admin_pb2.DrainResponse(remaining=self.running)


class FakeRegistry:
    """A registry held in memory. Every listing is a new heartbeat of whoever is in it."""

    def __init__(self) -> None:
        self.workers: dict[str, ScriptedDecode] = {}
        self.others: list[WorkerRecord] = []
        self.silent: set[str] = set()
        self.failing = False
        self._beat = 0
        self._last: dict[str, WorkerRecord] = {}

    async def list_workers(self) -> tuple[WorkerRecord, ...]:
        """See `core.control_state.WorkerRegistry`."""
        if self.failing:
            raise Unavailable("the registry is scripted to fail")
        self._beat += 1
        for worker in self.workers.values():
            if worker.alive and worker.epoch not in self.silent:
                self._last[worker.epoch] = replace(worker.record(), reported_unix_ms=self._beat)
        live = [self._last[worker.epoch] for worker in self.workers.values() if worker.epoch in self._last]
        return (*live, *(replace(record, reported_unix_ms=self._beat) for record in self.others))
