"""The prefill worker as a role of a worker process."""

import math
from typing import Self

from cluster.engines import load_engine, on_passing_thread, worker_record
from cluster.roles import Surroundings
from cluster.specs import WorkerSpec
from core.records import WorkerRecord
from core.ticket import TicketKeys
from engine.engine import Engine
from prefill.service import add_prefill_services
from prefill.worker import PrefillWorker


class PrefillRole:
    """A started prefill worker and its services."""

    def __init__(self, spec: WorkerSpec, around: Surroundings, engine: Engine, worker: PrefillWorker) -> None:
        self._spec = spec
        self._around = around
        self._engine = engine
        self._worker = worker

    @classmethod
    async def build(cls, spec: WorkerSpec, around: Surroundings) -> Self:
        """See `cluster.roles.build_role`."""
        settings = spec.settings
        engine = await on_passing_thread(lambda: load_engine(spec))
        await on_passing_thread(engine.warm_up)
        worker = PrefillWorker(
            engine,
            settings.prefill_worker,
            settings.handoff,
            around.identity,
            TicketKeys(settings.security.ticket_keys),
            model=settings.model,
            metrics=around.metrics.metrics,
        )
        add_prefill_services(around.rpc.server, worker)
        await worker.start()
        return cls(spec, around, engine, worker)

    def record(self) -> WorkerRecord:
        """See `Role`."""
        worker = self._worker
        return worker_record(
            self._spec,
            self._around,
            self._engine,
            worker.gauges(),
            ready=worker.ready,
            draining=worker.draining,
        )

    def healthy(self) -> bool:
        """See `Role`."""
        return self._worker.stalled_s() <= self._spec.settings.decode_worker.engine_stall_s

    def beyond_help(self) -> bool:
        """See `Role`."""
        return math.isinf(self._worker.stalled_s())

    async def drain(self, grace_s: float) -> int:
        """See `Role`."""
        return await self._worker.drain(grace_s)

    async def close(self) -> None:
        """See `Role`."""
        await self._worker.close()
        self._engine.close()
