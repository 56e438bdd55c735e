"""The decode worker as a role of a worker process."""

import asyncio
from typing import Self

from cluster.answer_sharing import AnswerSharing, lineage_of
from cluster.engines import (
    engine_settings,
    hosted_drafters,
    load_engine,
    on_passing_thread,
    worker_record,
)
from cluster.last_stage import LastStage, load_pipeline
from cluster.roles import Surroundings, model_directory
from cluster.specs import WorkerSpec
from core.environment import cache_directory
from core.errors import InvalidArgument
from core.model_store import resolve_model
from core.records import WorkerRecord
from core.settings import DecodeSettings
from core.ticket import TicketKeys
from core.tokenizer import Tokenizer
from decode.drafters.answer_link import AnswerLink
from decode.drafters.cache import CacheDrafter
from decode.drafters.vocabulary import vocabulary_digest
from decode.service import DecodeAdminService, DecodeService
from decode.worker import DecodeWorker
from engine.engine import Engine
from engine.pipeline_timeline import Timeline
from outrider.v1 import admin_pb2_grpc, decode_pb2_grpc


def _with_directories(spec: WorkerSpec) -> DecodeSettings:
    """Heads and draft model by their directories: like the target the latter may be an alias or a hub id."""
    drafters = hosted_drafters(spec)
    settings = spec.settings.decode_worker.model_copy(update={"drafters": drafters})
    draft = drafters.draft_model
    if draft is None:
        return settings
    try:
        directory = resolve_model(draft.model, cache_directory())
    except InvalidArgument as error:
        raise InvalidArgument(
            "decode_worker.drafters.draft_model.model", error.message.partition(": ")[2]
        ) from error
    named = draft.model_copy(update={"model": str(directory)})
    return settings.model_copy(update={"drafters": drafters.model_copy(update={"draft_model": named})})


async def _load_target(spec: WorkerSpec, around: Surroundings) -> tuple[Engine, LastStage | None]:
    """The engine, and of a pipelined one the process of its last stage. On the event loop that lives as long."""
    settings = spec.settings
    if settings.engine.pipeline_stages == 1:
        return await on_passing_thread(lambda: load_engine(spec)), None
    engine, last_stage = await load_pipeline(
        model_directory(spec),
        engine_settings(spec),
        around.identity.epoch,
        start_timeout_s=settings.start_timeout_s,
        silence_timeout_s=settings.decode_worker.engine_stall_s,
    )
    if settings.telemetry.pipeline_timeline:
        engine.timeline = Timeline()
    return engine, last_stage


async def _cache_in_use(
    spec: WorkerSpec, around: Surroundings, worker: DecodeWorker, tokenizer: Tokenizer
) -> AnswerSharing | None:
    """Shows the cache of earlier answers in the metrics, and links it to Redis where the settings say so.

    Before the worker starts.
    """
    cache = worker.drafters.get(CacheDrafter.name)
    if not isinstance(cache, CacheDrafter):
        return None
    around.metrics.metrics.observe_cache(cache.held, cache.events)
    if not cache.settings.share:
        return None
    secret = (spec.settings.security.cache_salt_secret or "").encode()
    link = AnswerLink(secret, cache.record_limits)
    cache.connect(link)

    async def take_in() -> None:
        if worker.num_live == 0:
            await worker.on_engine_thread(cache.receive_all)

    vocabulary = await asyncio.to_thread(lambda: vocabulary_digest(tokenizer))
    lineage = lineage_of(worker.engine.numerics.model_revision, vocabulary)
    return AnswerSharing(link, around.state, lineage, cache.settings, take_in)


class DecodeRole:
    """A started decode worker and its services."""

    def __init__(
        self,
        spec: WorkerSpec,
        around: Surroundings,
        worker: DecodeWorker,
        sharing: AnswerSharing | None,
        last_stage: LastStage | None,
    ) -> None:
        """`last_stage`: of a pipelined target."""
        self._last_stage = last_stage
        self._spec = spec
        self._around = around
        self._worker = worker
        self._sharing = sharing

    @classmethod
    async def build(cls, spec: WorkerSpec, around: Surroundings) -> Self:
        """See `cluster.roles.build_role`."""
        settings = spec.settings
        decode = await asyncio.to_thread(lambda: _with_directories(spec))
        engine, last_stage = await _load_target(spec, around)
        tokenizer = await asyncio.to_thread(lambda: Tokenizer.from_directory(model_directory(spec)))
        worker = await on_passing_thread(
            lambda: DecodeWorker(
                engine,
                decode,
                settings.handoff,
                around.identity,
                tokenizer,
                TicketKeys(settings.security.ticket_keys),
                settings.grpc,
                bearer_token=settings.security.bearer_token,
                metrics=around.metrics.metrics,
            )
        )
        server = around.rpc.server
        decode_pb2_grpc.add_DecodeServicer_to_server(DecodeService(worker), server)
        admin_pb2_grpc.add_AdminServicer_to_server(DecodeAdminService(worker, settings.model), server)
        sharing = await _cache_in_use(spec, around, worker, tokenizer)
        await worker.start()
        if sharing is not None:
            await sharing.catch_up()
            sharing.start(settings.registry.heartbeat_s)
        return cls(spec, around, worker, sharing, last_stage)

    def record(self) -> WorkerRecord:
        """See `Role`."""
        worker = self._worker
        return worker_record(
            self._spec,
            self._around,
            worker.engine,
            worker.gauges(),
            ready=worker.ready,
            draining=worker.draining,
            drafters=tuple(worker.drafters),
            max_draft_length=max(drafter.needs.max_draft_length for drafter in worker.drafters.values()),
        )

    def healthy(self) -> bool:
        """See `Role`."""
        return self._worker.healthy()

    def beyond_help(self) -> bool:
        """See `Role`. With half of its target gone a worker cannot go on."""
        return self._worker.beyond_help() or (self._last_stage is not None and not self._last_stage.alive)

    async def drain(self, grace_s: float) -> int:
        """See `Role`."""
        return await self._worker.drain(grace_s)

    async def close(self) -> None:
        """See `Role`."""
        if self._sharing is not None:
            await self._sharing.stop()
        await self._worker.close()
        self._worker.engine.close()
        if self._last_stage is not None:
            await self._last_stage.close()
