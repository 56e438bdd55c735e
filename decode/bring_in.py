"""How a request's prompt gets into this worker: from the prefix cache, from a prefill worker, or computed here."""

import asyncio
from dataclasses import dataclass, replace

from torch import Tensor

from core.clock import Clock
from core.errors import DataLoss, FailedPrecondition, InvalidArgument, PermissionDenied, Unavailable
from core.records import PrefillPeer
from core.settings import HandoffSettings
from decode.choice import Request
from decode.handoff import ChecksumFailed, FetchResult, HandoffClient, HandoffFailed, PeerRefused
from decode.loop import DecodeLoop
from decode.room import Requeued
from engine.engine_thread import EngineThread
from engine.kv_cache import KvCache, PlaneKind

_FINAL_REFUSALS = (FailedPrecondition, InvalidArgument, PermissionDenied)
"""What another peer would answer too, or what the operator must see."""


@dataclass(frozen=True, slots=True)
class Handoff:
    """What came of it. `outcome`: ok | retried | none_needed | own_prefill."""

    outcome: str = "none_needed"
    transport: str = ""
    num_bytes: int = 0
    blocks: int = 0
    prefill_worker_id: str = ""
    prefill_s: float = 0.0
    admitted_s: float = 0.0


class BringIn:
    """Runs on the event loop, one task a request; the engine thread does what touches tables."""

    def __init__(
        self,
        thread: EngineThread,
        loop: DecodeLoop,
        kv: KvCache,
        client: HandoffClient,
        settings: HandoffSettings,
        clock: Clock,
    ) -> None:
        self._thread = thread
        self._loop = loop
        self._kv = kv
        self._client = client
        self._settings = settings
        self._clock = clock

    async def run(self, request: Request, admitted: "Admissions", deadline_s: float | None) -> Handoff:
        """From the queue to the first token's logits. Raises ServiceErrors; cancelling it is safe.

        Whoever calls it drops the request afterwards, on every path: nothing is freed here.
        """
        self._thread.post(lambda: self._loop.enqueue(request))
        while True:
            await admitted.next()
            admitted_s = self._clock.now_s()
            try:
                return replace(await self._bring(request, deadline_s), admitted_s=admitted_s)
            except Requeued:
                continue

    async def _bring(self, request: Request, deadline_s: float | None) -> Handoff:
        missing = request.prompt_tokens - request.cached_tokens
        if missing == 1:
            await self._prefill_here(request)
            return Handoff("none_needed")
        if request.job.peers and not self._ticket_expired(request):
            fetched = await self._fetch(request, deadline_s)
            if fetched is not None:
                return fetched
        if self._settings.missing_prefill == "strict":
            raise Unavailable("no prefill worker could be reached, and this worker may not prefill by itself")
        await self._prefill_here(request)
        return Handoff("own_prefill")

    async def _prefill_here(self, request: Request) -> None:
        await self._thread.answer_to(lambda answer: self._loop.prefill_here(request, answer))

    async def _fetch(self, request: Request, deadline_s: float | None) -> Handoff | None:
        """The hand-off from the first peer that gives it; None where none did.

        Tried once more: a failed checksum, and a peer that gave up while this worker had no room; now it has.
        """
        sink = _Sink(self, request)
        checksum_failed = False
        peers = list(request.job.peers)
        tried: list[PrefillPeer] = []
        while peers:
            peer = peers.pop(0)
            retried = bool(tried)
            tried.append(peer)
            try:
                result = await self._client.fetch(
                    peer, request.job.ticket, request.job.prompt_ids, request.cached_tokens, sink, deadline_s
                )
            except ChecksumFailed as error:
                if not checksum_failed:
                    checksum_failed = True
                    peers.insert(0, peer)
                elif self._settings.bad_checksum == "fail":
                    raise DataLoss(f"KV from {peer.worker_id} failed its checks twice: {error}") from error
                else:
                    return None
            except HandoffFailed as error:
                refusal = error.error if isinstance(error, PeerRefused) else None
                if isinstance(refusal, _FINAL_REFUSALS) and not self._ticket_expired(request):
                    raise refusal from error
                if sink.kept_waiting:
                    sink.kept_waiting = False
                    peers.insert(0, peer)
            else:
                return await self._take(request, peer, result, retried)
        return None

    def _ticket_expired(self, request: Request) -> bool:
        """It held when the request came; one that expired in the queue opens no peer, but costs no answer either."""
        return request.job.claims.expires_unix_ms < self._clock.unix_ms()

    async def _take(self, request: Request, peer: PrefillPeer, result: FetchResult, retried: bool) -> Handoff:
        logits: Tensor = result.logits
        await self._thread.call(lambda: self._loop.begin(request, logits))
        return Handoff(
            outcome="retried" if retried else "ok",
            transport="grpc",
            num_bytes=result.bytes,
            blocks=result.blocks,
            prefill_worker_id=peer.worker_id,
            prefill_s=result.prefill_s,
        )

    async def reserve(self, request: Request) -> tuple[Tensor, bool]:
        """Blocks for the whole prompt, when there are: slots of what is missing, and whether a peer had to wait long.

        slots: Tensor  # [tokens] int32
        """
        asked_s = self._clock.now_s()
        await self._thread.answer_to(lambda answer: self._loop.reserve(request, answer))
        slots = await self._thread.call(lambda: self._slots(request))
        return slots, self._clock.now_s() - asked_s > self._settings.progress_timeout_s

    def write(self, kind: PlaneKind, layer: int, slots: Tensor, values: Tensor, head_start: int) -> None:
        """One plane into reserved slots."""
        self._kv.write_plane(kind, layer, slots, values, head_start)

    def _slots(self, request: Request) -> Tensor:
        table = request.prompt_table
        if table is None:
            raise Requeued
        return self._kv.slots(table, request.cached_tokens, request.prompt_tokens)


class Admissions:
    """Tells a request's task, again and again, that the request has been admitted."""

    def __init__(self) -> None:
        self._event_loop = asyncio.get_running_loop()
        self._admitted = asyncio.Event()

    def announce(self, _: Request) -> None:
        """Called on the engine thread."""
        self._event_loop.call_soon_threadsafe(self._admitted.set)

    async def next(self) -> None:
        """Waits for the next admission."""
        await self._admitted.wait()
        self._admitted.clear()


class _Sink:
    """Writes one request's planes to its reserved slots."""

    def __init__(self, owner: BringIn, request: Request) -> None:
        self._owner = owner
        self._request = request
        self._slots: Tensor | None = None
        self.kept_waiting = False

    async def reserve(self, num_tokens: int) -> None:
        """See `HandoffSink`."""
        if num_tokens != self._request.prompt_tokens:
            raise ChecksumFailed(f"{num_tokens} tokens announced for {self._request.prompt_tokens}")
        if self._slots is None:
            self._slots, self.kept_waiting = await self._owner.reserve(self._request)

    def write(
        self, kind: PlaneKind, layer: int, token_start: int, token_end: int, head_start: int, values: Tensor
    ) -> None:
        """See `HandoffSink`."""
        assert self._slots is not None, "written before reserved"
        first = self._request.cached_tokens
        self._owner.write(
            kind, layer, self._slots[token_start - first : token_end - first], values, head_start
        )
