"""The router as a role of a worker process."""

import asyncio
import os
from typing import Final, Self

from cluster.roles import Surroundings, model_directory
from cluster.specs import WorkerSpec
from core.clock import Clock, SystemClock
from core.control_state import ControlState, ControlStateUnavailable
from core.errors import DeadlineExceeded
from core.metrics import LoadGauges
from core.records import WorkerRecord
from core.tokenizer import Tokenizer
from router.directory import WorkerDirectory
from router.router import Router
from router.service import RouterService
from router.views import ServedModel

_LOOK_AGAIN_S: Final = 0.1


class RouterRole:
    """Built as soon as one decode worker is known, which tells the model's revision and context."""

    def __init__(self, router: Router, model: ServedModel, around: Surroundings) -> None:
        self._router = router
        self._model = model
        self._identity = around.identity
        self._metrics_address = around.metrics.address

    @classmethod
    async def build(cls, spec: WorkerSpec, around: Surroundings) -> Self:
        """See `cluster.roles.build_role`."""
        settings = spec.settings
        directory = await asyncio.to_thread(model_directory, spec)
        tokenizer = await asyncio.to_thread(Tokenizer.from_directory, directory)
        known = await first_worker(around.state, settings.start_timeout_s)
        model = ServedModel(
            name=settings.model,
            revision=known.model_revision,
            vocab_size=tokenizer.vocab_size,
            max_context=known.max_context,
        )
        router = Router(
            settings.router,
            settings.security,
            settings.grpc,
            WorkerDirectory(around.state, settings.router),
            tokenizer,
            model,
            around.identity,
            metrics=around.metrics.metrics,
            metrics_address=around.metrics.address,
        )
        RouterService(router).add_to(around.rpc.server)
        await router.start()
        role = cls(router, model, around)
        around.metrics.metrics.observe_load(role.load)
        return role

    def record(self) -> WorkerRecord:
        """See `Role`."""
        status = self._router.status()
        return WorkerRecord(
            worker_id=self._identity.worker_id,
            role="router",
            address=self._identity.address,
            epoch=self._identity.epoch,
            model=self._model.name,
            model_revision=self._model.revision,
            numerics_class="",
            ready=status.ready or status.draining,
            draining=status.draining,
            running=status.running,
            waiting=status.waiting,
            free_blocks=0,
            total_blocks=0,
            block_size=0,
            max_context=self._model.max_context,
            process_id=os.getpid(),
            metrics_address=self._metrics_address,
        )

    def load(self) -> LoadGauges:
        """For the gauges of `/metrics`."""
        status = self._router.status()
        return LoadGauges(running=status.running, waiting=status.waiting)

    def healthy(self) -> bool:
        """A router has no engine thread; its loop beats the heart itself."""
        return True

    def beyond_help(self) -> bool:
        """See `Role`."""
        return False

    async def drain(self, grace_s: float) -> int:
        """See `Role`."""
        return await self._router.drain(grace_s)

    async def close(self) -> None:
        """See `Role`."""
        await self._router.close()


async def first_worker(state: ControlState, timeout_s: float, clock: Clock | None = None) -> WorkerRecord:
    """The first decode worker that the registry knows; looks again until there is one."""
    clock = clock or SystemClock()
    deadline_s = clock.now_s() + timeout_s
    while True:
        try:
            workers = await state.list_workers()
        except ControlStateUnavailable:
            workers = ()
        for record in workers:
            if record.role == "decode":
                return record
        if clock.now_s() >= deadline_s:
            raise DeadlineExceeded(f"no decode worker within {timeout_s:g} s")
        await asyncio.sleep(_LOOK_AGAIN_S)
