"""The process behind the CLI: it owns Ray, redis and the workers, and ends them all when the CLI ends in any way.

Started by `cluster/serve.py` as `python -m cluster.supervisor`. On stdin: one line of settings (secrets included, so
that they are in no argument and no file), then `drain` or `now`; the end of stdin means that the CLI is dead. On
stdout: one JSON event a line. SIGTERM and SIGINT are as `drain` once Ray is about to start here. It adopts orphans, so
that every descendant stays in sight.
"""

import asyncio
import json
import logging
import os
import secrets
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, TextIO

from cluster.local import free_port
from cluster.preflight import require_files
from cluster.processes import adopt_orphans, end_descendants
from cluster.specs import WorkerReady, WorkerSpec, worker_specs
from core.auth import split_address
from core.environment import (
    cache_directory,
    compute_thread_variables,
    log_directory,
    remove_secrets,
    set_variables,
)
from core.errors import FailedPrecondition, ServiceError
from core.grpc_admin import AdminClient
from core.grpc_server import require_free
from core.model_store import resolve_model
from core.settings import RegistrySettings, ServeSettings

_LOGGER: Final = logging.getLogger(__name__)
_CLOSE_TIMEOUT_S: Final = 2.0
_LOOK_AGAIN_S: Final = 0.1
_SWEEP_TIMEOUT_S: Final = 5.0
_STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
_RAY_VARIABLES: Final = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_kill_idle_workers_interval_ms": "200",
    "RAY_DEDUP_LOGS": "0",
    "RAY_worker_niceness": "0",
}
"""A small, quiet Ray. Its memory monitor would kill workers for what other processes of the machine use, and its
usual niceness of 15 would let any other process starve them."""


class Events:
    """Tells the CLI what happens. Nothing but events may reach its pipe, so stdout becomes stderr for all others."""

    def __init__(self) -> None:
        self._pipe: TextIO = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def send(self, kind: str, text: str) -> None:
        """One event; a CLI that is gone is noticed elsewhere."""
        try:
            self._pipe.write(json.dumps({"kind": kind, "text": text}) + "\n")
            self._pipe.flush()
        except BrokenPipeError:
            return


def main() -> None:
    """Runs one deployment to its end."""
    adopt_orphans()
    events = Events()
    settings = ServeSettings.model_validate_json(sys.stdin.readline())
    remove_secrets()
    directory = _make_directory()
    code = 1
    try:
        asyncio.run(_supervise(settings, directory, events))
        code = 0
    except ServiceError as error:
        events.send("failed", error.message)
    except Exception as error:  # boundary: the CLI is told, and nothing stays behind
        _LOGGER.exception("the supervisor failed")
        events.send("failed", f"{type(error).__name__}: {error}")
    for number in _STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    _end(directory)
    os._exit(code)


def _make_directory() -> Path:
    parent = log_directory()
    if parent is not None:
        parent.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix="outrider-", dir=parent))


def _end(directory: Path) -> None:
    end_descendants(_SWEEP_TIMEOUT_S)
    if log_directory() is None:
        shutil.rmtree(directory, ignore_errors=True)


async def _supervise(settings: ServeSettings, directory: Path, events: Events) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    control = threading.Thread(
        target=_obey, args=(loop, stop, directory), name="supervisor-control", daemon=True
    )
    control.start()
    if settings.ray_address is None:
        await _run_local(settings, directory, events, stop)
    else:
        await _deploy_to_cluster(settings, events)


def _obey(loop: asyncio.AbstractEventLoop, stop: asyncio.Event, directory: Path) -> None:
    """Reads the CLI's commands. The end of the pipe, and `now`, end everything at once."""
    for line in sys.stdin:
        if line.strip() == "now":
            break
        loop.call_soon_threadsafe(stop.set)
    _end(directory)
    os._exit(1)


async def _run_local(settings: ServeSettings, directory: Path, events: Events, stop: asyncio.Event) -> None:
    require_files(settings)
    for number in _STOP_SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    set_variables({**compute_thread_variables(settings.engine.num_threads), **_RAY_VARIABLES})
    set_variables({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)})
    from cluster.pools import Pools, leave_ray, start_local_ray

    settings = _with_turns(_with_port(settings), directory)
    require_free(settings.listen)
    resolving = asyncio.to_thread(
        resolve_model, settings.model, cache_directory(), lambda line: events.send("progress", line)
    )
    if not await _unless_stopped(resolving, stop):
        _end(directory)
        os._exit(0)
    fate = "" if log_directory() is not None else "; OUTRIDER_LOG_DIRECTORY=FOLDER keeps them"
    events.send("progress", f"starting redis and ray (logs: {directory}{fate})")
    async with _control_state(settings.redis_url, directory, settings.registry) as redis_url:
        specs = worker_specs(settings, redis_url, "127.0.0.1")
        await asyncio.to_thread(start_local_ray, len(specs), directory / "ray")
        pools = Pools(settings, detached=False)
        events.send("progress", f"loading {settings.model} in {len(specs) - 1} workers")
        await asyncio.to_thread(pools.start, specs)
        waiting = asyncio.to_thread(
            pools.wait_ready,
            settings.start_timeout_s,
            lambda ready: events.send("progress", _ready_line(ready)),
        )
        if not await _unless_stopped(waiting, stop):
            _end(directory)
            os._exit(0)
        if not await _unless_stopped(_until_routed(settings, specs), stop):
            _end(directory)
            os._exit(0)
        events.send("ready", settings.listen)
        await stop.wait()
        events.send("progress", "draining")
        left = await asyncio.to_thread(pools.drain, settings.drain_grace_s)
        if left:
            events.send("progress", f"{left} requests did not end within {settings.drain_grace_s:g} s")
        await asyncio.to_thread(pools.close, _CLOSE_TIMEOUT_S)
        await asyncio.to_thread(leave_ray)


async def _until_routed(settings: ServeSettings, specs: Sequence[WorkerSpec]) -> None:
    """Waits until the router is serving and knows every worker: the registry is polled, so it hears a bit later."""
    client = AdminClient(settings.listen, settings.security.bearer_token)
    wanted = {spec.worker_id for spec in specs}
    async with asyncio.timeout(settings.start_timeout_s):
        while True:
            try:
                known = await asyncio.to_thread(client.list_workers)
            except ServiceError:
                known = ()
            everybody = {status.worker_id for status in known if status.ready} >= wanted
            if everybody and await asyncio.to_thread(client.is_serving):
                return
            await asyncio.sleep(_LOOK_AGAIN_S)


async def _unless_stopped(waiting: Coroutine[None, None, object], stop: asyncio.Event) -> bool:
    """Whether `waiting` ended before `stop`; its error is raised."""
    work = asyncio.create_task(waiting)
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not work.done():
        return False
    await work
    return True


@asynccontextmanager
async def _control_state(url: str | None, directory: Path, registry: RegistrySettings) -> AsyncIterator[str]:
    if url is not None:
        yield url
        return
    from cluster.redis_server import RedisServer

    async with RedisServer(directory / "redis", registry) as server:
        yield server.url


async def _deploy_to_cluster(settings: ServeSettings, events: Events) -> None:
    """Leaves the deployment in somebody's Ray. Redis must be reachable from every node, so its URL is needed."""
    from cluster.pools import Pools, join_ray, leave_ray, node_addresses

    if settings.redis_url is None or settings.ray_address is None:
        raise FailedPrecondition("redis", "--ray-address needs --redis URL, reachable from every node")
    await asyncio.to_thread(join_ray, settings.ray_address)
    host = "127.0.0.1" if len(node_addresses()) == 1 else None
    pools = Pools(settings, detached=True)
    specs = worker_specs(settings, settings.redis_url, host)
    try:
        await asyncio.to_thread(pools.start, specs)
        await asyncio.to_thread(
            pools.wait_ready,
            settings.start_timeout_s,
            lambda ready: events.send("progress", _ready_line(ready)),
        )
        await _until_routed(settings, specs)
    except ServiceError:
        await asyncio.to_thread(pools.close, _CLOSE_TIMEOUT_S)
        raise
    events.send("ready", settings.listen)
    await asyncio.to_thread(leave_ray)


def _ready_line(ready: WorkerReady) -> str:
    metrics = f", metrics on http://{ready.metrics_address}/metrics" if ready.metrics_address else ""
    return f"{ready.worker_id} ready on {ready.address}{metrics}"


def _with_port(settings: ServeSettings) -> ServeSettings:
    """Port 0 is resolved once, so that a restarted router comes back where it was."""
    host, port = split_address(settings.listen)
    if port != 0:
        return settings
    return settings.model_copy(update={"listen": f"{host}:{free_port()}"})


def _with_turns(settings: ServeSettings, directory: Path) -> ServeSettings:
    """Workers that want more cores than there are take turns; a pipelined target does not."""
    wanted = (settings.prefill + settings.decode) * settings.engine.num_threads
    pipelined = settings.engine.pipeline_stages > 1
    if pipelined or settings.engine.core_turns is not None or wanted <= len(os.sched_getaffinity(0)):
        return settings
    engine = settings.engine.model_copy(update={"core_turns": directory / "core-turns"})
    return settings.model_copy(update={"engine": engine})


if __name__ == "__main__":
    main()
