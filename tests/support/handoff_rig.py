"""A prefill worker behind a real socket, and the decode side that fetches from it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import grpc.aio
from torch import Tensor

from core.clock import Clock, SystemClock
from core.grpc_options import channel_options
from core.grpc_server import make_server
from core.identity import WorkerIdentity, new_epoch
from core.prefix_hash import prompt_digest
from core.records import PrefillPeer, TicketClaims
from core.settings import GrpcSettings, HandoffSettings, PrefillSettings
from core.ticket import TicketKeys
from decode.handoff import FetchResult, HandoffClient
from engine.block_table import BlockTable
from engine.kv_cache import KvCache, PlaneKind
from engine.peer_info import describe_peer
from outrider.v1 import admin_pb2, common_pb2, prefill_pb2, prefill_pb2_grpc
from prefill.runner import ForwardEngine
from prefill.service import add_prefill_services
from prefill.worker import PrefillWorker

KEYS = TicketKeys(["00112233445566778899aabbccddeeff"])
OTHER_KEYS = TicketKeys(["ffeeddccbbaa99887766554433221100"])
NEVER_MS = 1 << 52
HANDOFF = HandoffSettings(credit_bytes=2**16, chunk_bytes=2**12, progress_timeout_s=5.0, queue_timeout_s=10.0)
GRPC = GrpcSettings(keepalive_time_s=10.0)


class TableSink:
    """A hand-off's planes go into a table of a decode-side pool, behind what it holds already."""

    def __init__(self, kv: KvCache, table: BlockTable) -> None:
        self.kv = kv
        self.table = table
        self.num_writes = 0
        self.before_reserve: Callable[[], asyncio.Future[None] | None] = lambda: None
        self.refusal: Exception | None = None

    async def reserve(self, num_tokens: int) -> None:
        waiting = self.before_reserve()
        if waiting is not None:
            await waiting
        if self.refusal is not None:
            raise self.refusal
        self.kv.reserve(self.table, num_tokens)

    def write(
        self, kind: PlaneKind, layer: int, token_start: int, token_end: int, head_start: int, values: Tensor
    ) -> None:
        self.num_writes += 1
        self.kv.write_plane(
            kind, layer, self.kv.slots(self.table, token_start, token_end), values, head_start
        )


@dataclass(slots=True)
class Rig:
    """Both ends. `receiver` is the decode side's pool."""

    engine: ForwardEngine
    worker: PrefillWorker
    peer: PrefillPeer
    client: HandoffClient
    receiver: KvCache
    ours: common_pb2.PeerInfo
    clock: Clock
    num_requests: int = 0

    def claims(self, token_ids: Sequence[int], **changes: object) -> TicketClaims:
        """A fresh request's claims for this prompt."""
        self.num_requests += 1
        claims = TicketClaims(
            request_id=f"request-{self.num_requests}",
            attempt=0,
            tenant="tenant",
            prompt_digest=prompt_digest(token_ids),
            model_revision=self.worker.peer.model_revision,
            adapter="",
            numerics_class=self.worker.peer.numerics_class,
            seed=0,
            decode_worker_id="decode-0",
            decode_epoch=self.ours.epoch,
            prefill_worker_ids=(self.peer.worker_id,),
            expires_unix_ms=NEVER_MS,
            cache_salt=b"salt",
        )
        return replace(claims, **changes)  # type: ignore[arg-type]  # the tests name real fields

    def ticket(self, token_ids: Sequence[int], **changes: object) -> common_pb2.Ticket:
        """A signed ticket for this prompt."""
        return KEYS.sign(self.claims(token_ids, **changes))

    async def fetch(self, token_ids: Sequence[int], kv_start: int = 0) -> tuple[BlockTable, FetchResult]:
        """Fetch into a new table of the receiver's pool, whose first `kv_start` tokens are taken as held."""
        table = self.receiver.open()
        self.receiver.reserve(table, kv_start)
        self.receiver.commit(table, kv_start)
        sink = TableSink(self.receiver, table)
        result = await self.client.fetch(self.peer, self.ticket(token_ids), token_ids, kv_start, sink)
        self.receiver.commit(table, len(token_ids))
        return table, result

    @asynccontextmanager
    async def raw_stream(
        self, token_ids: Sequence[int], *, kv_start: int = 0, credit_bytes: int = 2**16, **changes: object
    ) -> AsyncIterator["grpc.aio.StreamStreamCall[prefill_pb2.FetchUp, prefill_pb2.FetchDown]"]:
        """An opened Fetch stream, message by message."""
        async with grpc.aio.insecure_channel(self.peer.address, options=channel_options(GRPC)) as channel:
            call = prefill_pb2_grpc.PrefillStub(channel).Fetch()
            await call.write(
                prefill_pb2.FetchUp(open=self.open(token_ids, kv_start, credit_bytes, **changes))
            )
            yield call
            call.cancel()

    def open(
        self, token_ids: Sequence[int], kv_start: int = 0, credit_bytes: int = 2**16, **changes: object
    ) -> prefill_pb2.FetchOpen:
        """An opening message; `changes` go into the claims."""
        message = prefill_pb2.FetchOpen(
            ticket=self.ticket(token_ids, **changes),
            token_ids=token_ids,
            kv_range=prefill_pb2.TokenRange(start=kv_start, end=len(token_ids)),
            transport="grpc",
            credit_bytes=credit_bytes,
        )
        if self.engine.kv.layout.hidden_layers:
            message.hidden_range.CopyFrom(prefill_pb2.TokenRange(start=kv_start, end=len(token_ids)))
        return message

    async def idle(self, timeout_s: float = 5.0) -> None:
        """Until the worker holds nothing; fails after `timeout_s`. Checks the pool's own accounts."""
        async with asyncio.timeout(timeout_s):
            await self.worker.idle()
        status = self.worker.status()
        assert (status.leases, status.used_blocks, status.waiting, status.running) == (0, 0, 0, 0)

    async def until(self, reached: Callable[[admin_pb2.WorkerStatus], bool], timeout_s: float = 5.0) -> None:
        """Until the worker's status says so."""
        async with asyncio.timeout(timeout_s):
            while not reached(self.worker.status()):  # noqa: ASYNC110  # no event in the other thread
                await asyncio.sleep(0.002)


@asynccontextmanager
async def handoff_rig(
    engine: ForwardEngine,
    receiver: KvCache,
    *,
    handoff: HandoffSettings = HANDOFF,
    prefill: PrefillSettings | None = None,
    client_handoff: HandoffSettings | None = None,
    clock: Clock | None = None,
) -> AsyncIterator[Rig]:
    """Starts both ends and stops them."""
    identity = WorkerIdentity("prefill-0", "prefill", new_epoch())
    settings = prefill or PrefillSettings(chunk_tokens=16)
    worker = PrefillWorker(engine, settings, handoff, identity, KEYS, clock=clock)
    rpc = make_server(GRPC)
    add_prefill_services(rpc.server, worker)
    await worker.start()
    address = await rpc.listen("127.0.0.1:0")
    worker.identity = replace(identity, address=address)
    ours = describe_peer(WorkerIdentity("decode-0", "decode", new_epoch()), receiver.layout, engine.numerics)
    client = HandoffClient(ours, receiver.layout, engine.config.vocab_size, client_handoff or handoff, GRPC)
    peer = PrefillPeer(identity.worker_id, identity.epoch, address)
    try:
        yield Rig(engine, worker, peer, client, receiver, ours, SystemClock())
    finally:
        await client.close()
        await rpc.stop(0.0)
        await worker.close()
