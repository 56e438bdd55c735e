"""One worker in its process: a thread with an event loop of its own, from loading the model to the last goodbye.

Ray starts the process and carries a few calls to it (`cluster/actors.py`); everything else speaks gRPC with the
loop here. After a crash Ray starts a new process, which draws a new epoch and announces itself again.
"""

import asyncio
import logging
import os
import threading
from concurrent.futures import Future
from contextlib import AsyncExitStack
from typing import Final

from cluster.heartbeat import Heartbeat
from cluster.roles import Role, Surroundings, build_role
from cluster.specs import WorkerFailed, WorkerReady, WorkerSpec
from core.control_state import ControlState
from core.grpc_server import RpcServer, make_server
from core.identity import WorkerIdentity, new_epoch
from core.metrics import MetricsServer
from core.telemetry import setup_telemetry

_LOGGER: Final = logging.getLogger(__name__)
_CLOSE_TIMEOUT_S: Final = 3.0
_LAST_WORDS_S: Final = 0.5
_FAILURE_LINGER_S: Final = 5.0


class WorkerProcess:
    """Runs `spec` from construction on. The methods block and may be called from any thread."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self._started: Future[WorkerReady | WorkerFailed] = Future()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._role: Role | None = None
        self._rpc: RpcServer | None = None
        self._thread = threading.Thread(target=self._run, name=spec.worker_id, daemon=True)
        self._thread.start()

    def wait_ready(self, timeout_s: float) -> WorkerReady | WorkerFailed:
        """Waits until the worker answers, or cannot. Raises TimeoutError."""
        return self._started.result(timeout_s)

    def drain(self, grace_s: float) -> int:
        """Not ready at once, no new work; waits at most `grace_s` for what runs. Returns what is left."""
        return asyncio.run_coroutine_threadsafe(self._drain(grace_s), self._loop).result(grace_s + 5.0)

    def close(self) -> None:
        """Ends the worker in order, cancelling what runs. The process stays, for Ray to end."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._main())
        except Exception as error:  # boundary: the process ends with it, and Ray starts the next one
            _LOGGER.exception("%s failed", self._spec.worker_id)
            if not self._started.done():
                self._started.set_result(
                    WorkerFailed(self._spec.worker_id, f"{type(error).__name__}: {error}")
                )
                threading.Event().wait(_FAILURE_LINGER_S)
            os._exit(1)

    async def _main(self) -> None:
        spec = self._spec
        telemetry = setup_telemetry(spec.settings.telemetry, spec.role, spec.worker_id)
        metrics_server = MetricsServer(spec.settings.telemetry, spec.role, spec.worker_id)
        async with AsyncExitStack() as stack:
            stack.callback(telemetry.shutdown)
            stack.callback(metrics_server.shutdown)
            state = ControlState(spec.redis_url, spec.settings.registry)
            stack.push_async_callback(state.close)
            rpc = self._rpc = make_server(spec.settings.grpc, spec.settings.security.bearer_token)
            stack.push_async_callback(rpc.stop, _LAST_WORDS_S)
            address = rpc.bind(spec.listen or "127.0.0.1:0")
            identity = WorkerIdentity(spec.worker_id, spec.role, new_epoch(), address)
            role = self._role = await build_role(spec, Surroundings(identity, state, metrics_server, rpc))
            stack.push_async_callback(role.close)
            await rpc.start()
            heartbeat = Heartbeat(role, rpc, state, spec.settings)
            await heartbeat.beat()
            stack.push_async_callback(heartbeat.stop)
            heartbeat.start()
            self._started.set_result(
                WorkerReady(spec.worker_id, identity.epoch, address, os.getpid(), metrics_server.address)
            )
            await self._stop.wait()

    async def _drain(self, grace_s: float) -> int:
        if self._role is None or self._rpc is None:
            return 0
        await self._rpc.set_ready(False)
        return await self._role.drain(grace_s)
