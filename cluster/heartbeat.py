"""What a worker tells others about itself, again and again: its registry record and its readiness."""

import asyncio
import logging
import os
from dataclasses import replace
from typing import Final

from cluster.roles import Role
from core.clock import Clock, SystemClock
from core.control_state import ControlStateUnavailable, WorkerRegistry
from core.grpc_server import RpcServer
from core.settings import ServeSettings

_LOGGER: Final = logging.getLogger(__name__)


class Heartbeat:
    """Beats every `registry.heartbeat_s`. Redis being away is no reason to stop serving: the next beat tries again."""

    def __init__(
        self,
        role: Role,
        rpc: RpcServer,
        registry: WorkerRegistry,
        settings: ServeSettings,
        clock: Clock | None = None,
    ) -> None:
        self._role = role
        self._rpc = rpc
        self._registry = registry
        self._settings = settings
        self._clock = clock or SystemClock()
        self._task: asyncio.Task[None] | None = None
        self._lost = False
        self._unhealthy_since_s: float | None = None

    def start(self) -> None:
        """Beats from now on. Called once, on the worker's loop."""
        self._task = asyncio.create_task(self._run(), name="heartbeat")

    async def stop(self) -> None:
        """Ends it and takes the record out of the registry, if Redis answers."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        record = self._role.record()
        try:
            await self._registry.withdraw(record.worker_id, record.epoch)
        except ControlStateUnavailable:
            _LOGGER.warning("%s leaves, and the control state does not answer", record.worker_id)

    async def beat(self) -> None:
        """Once: readiness into the health service, the record into the registry."""
        record = self._role.record()
        ready = record.ready and not record.draining and self._role.healthy()
        if ready != self._rpc.ready:
            await self._rpc.set_ready(ready)
        record = replace(
            record, ready=ready, reported_unix_ms=self._clock.unix_ms(), address=self._rpc.address
        )
        try:
            await self._registry.publish(record, self._settings.registry.ttl_s)
        except ControlStateUnavailable as error:
            if not self._lost:
                _LOGGER.warning("%s: %s", record.worker_id, error)
            self._lost = True
        else:
            self._lost = False

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._settings.registry.heartbeat_s)
            await self.beat()
            if self._is_beyond_help():
                _LOGGER.critical("the engine does not move, and will not: ending the process")
                os._exit(1)

    def _is_beyond_help(self) -> bool:
        """Lost for good, or unhealthy for another `engine_stall_s` after it was found so."""
        if self._role.beyond_help():
            return True
        if self._role.healthy():
            self._unhealthy_since_s = None
            return False
        now_s = self._clock.now_s()
        if self._unhealthy_since_s is None:
            self._unhealthy_since_s = now_s
        return now_s - self._unhealthy_since_s > self._settings.decode_worker.engine_stall_s
