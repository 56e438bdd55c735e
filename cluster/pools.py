"""The workers of a deployment as Ray actors: placed, started, waited for, ended. Calls block.

Local mode owns its Ray and everything in it. Cluster mode leaves detached, named actors in the namespace of the
deployment, which `outrider down` ends.
"""

import logging
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.actors import WorkerActor
from cluster.specs import WorkerFailed, WorkerReady, WorkerSpec
from core.clock import Clock, SystemClock
from core.environment import compute_thread_variables
from core.errors import Internal, Unavailable
from core.settings import ServeSettings

NAMESPACE: Final = "outrider"
_OBJECT_STORE_BYTES: Final = 80 * 2**20
_PLACEMENT_TIMEOUT_S: Final = 60.0
_CALLS_AT_ONCE: Final = 8
_CONNECT_S: Final = 5.0


@dataclass(slots=True)
class _Placed:
    spec: WorkerSpec
    group: PlacementGroup
    actor: Any  # Any: Ray makes actor handles at run time


def start_local_ray(num_workers: int, directory: Path) -> None:
    """A Ray of our own, ended with this process. The environment variables are set by the caller before."""
    ray.init(
        address="local",
        include_dashboard=False,
        num_cpus=num_workers,
        num_gpus=0,
        object_store_memory=_OBJECT_STORE_BYTES,
        log_to_driver=False,
        logging_level=logging.ERROR,
        namespace=NAMESPACE,
        _temp_dir=str(directory),
    )


def join_ray(address: str) -> None:
    """Connects to somebody else's Ray. Raises Unavailable, at once where nobody listens: Ray would wait a minute."""
    host, _, port = address.rpartition(":")
    try:
        if port.isdigit():
            socket.create_connection((host.rpartition("/")[2].strip("[]"), int(port)), _CONNECT_S).close()
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, namespace=NAMESPACE)
    except (OSError, OverflowError, RayError, ValueError) as error:
        raise Unavailable(f"ray at {address}: {error}") from error


def node_addresses() -> tuple[str, ...]:
    """The addresses of the cluster's live nodes, without repeats."""
    return tuple(sorted({node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}))


def leave_ray() -> None:
    """Disconnects; in local mode this ends Ray's processes."""
    ray.shutdown()


class Pools:
    """The actors of one deployment."""

    def __init__(self, settings: ServeSettings, *, detached: bool, clock: Clock | None = None) -> None:
        self._settings = settings
        self._detached = detached
        self._clock = clock or SystemClock()
        self._placed: list[_Placed] = []

    def start(self, specs: Sequence[WorkerSpec]) -> None:
        """Places and starts every worker. Raises Unavailable where the cluster has no room in time."""
        for spec in specs:
            self._placed.append(self._start_one(spec))

    def _start_one(self, spec: WorkerSpec) -> _Placed:
        cpus = _compute_threads(spec) if self._detached and spec.role != "router" else 1.0
        lifetime = "detached" if self._detached else None
        group = placement_group([{"CPU": cpus}], lifetime=lifetime, name=f"group-{spec.worker_id}")
        if not group.wait(timeout_seconds=_PLACEMENT_TIMEOUT_S):
            remove_placement_group(group)
            raise Unavailable(
                f"{spec.worker_id}: no node has {cpus:g} CPUs free within {_PLACEMENT_TIMEOUT_S:g} s; "
                f"free in all: {ray.available_resources().get('CPU', 0.0):g}"
            )
        options: dict[str, Any] = {}  # Any: Ray's own keyword values
        if self._detached:
            options = {"name": spec.worker_id, "lifetime": "detached", "namespace": NAMESPACE}
            options["runtime_env"] = {"env_vars": compute_thread_variables(self._settings.engine.num_threads)}
        actor = (
            ray.remote(WorkerActor)
            .options(
                num_cpus=cpus,
                max_restarts=-1,
                max_concurrency=_CALLS_AT_ONCE,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, 0),
                **options,
            )
            .remote(spec)
        )
        return _Placed(spec, group, actor)

    def wait_ready(self, timeout_s: float, on_ready: Callable[[WorkerReady], None]) -> None:
        """Waits for all, telling each once. Raises Internal with the reason where one cannot start."""
        deadline_s = self._clock.now_s() + timeout_s
        pending = {placed.actor.wait_ready.remote(timeout_s): placed for placed in self._placed}
        while pending:
            remaining_s = max(0.0, deadline_s - self._clock.now_s())
            done, _ = ray.wait(list(pending), num_returns=1, timeout=remaining_s)
            if not done:
                names = ", ".join(sorted(placed.spec.worker_id for placed in pending.values()))
                raise Internal(f"not ready within {timeout_s:g} s: {names}")
            placed = pending.pop(done[0])
            try:
                answer = ray.get(done[0])
            except RayActorError:
                pending[placed.actor.wait_ready.remote(timeout_s)] = placed
                continue
            if isinstance(answer, WorkerFailed):
                raise Internal(f"{answer.worker_id} cannot start: {answer.reason}")
            on_ready(answer)

    def drain(self, grace_s: float) -> int:
        """Drains the router: new requests are refused, running ones may end within `grace_s`. What is left."""
        routers = [placed.actor for placed in self._placed if placed.spec.role == "router"]
        return sum(_answers([actor.drain.remote(grace_s) for actor in routers], grace_s + 1.0))

    def close(self, timeout_s: float) -> None:
        """Ends all workers, the router first, in order where they can within `timeout_s` for each of the two
        groups, and gives their places back.
        """
        for is_router in (True, False):
            group = [placed.actor for placed in self._placed if (placed.spec.role == "router") is is_router]
            _answers([actor.close.remote() for actor in group], timeout_s)
        for placed in self._placed:
            ray.kill(placed.actor, no_restart=True)
            remove_placement_group(placed.group)
        self._placed.clear()


def _compute_threads(spec: WorkerSpec) -> float:
    """Of a worker with an engine; each stage of a pipelined target has its own."""
    engine = spec.settings.engine
    return float(engine.num_threads * (engine.pipeline_stages if spec.role == "decode" else 1))


def end_deployment(timeout_s: float) -> tuple[str, ...]:
    """Cluster mode: ends every detached actor of the namespace, the router first. Returns their names."""
    entries: list[Any] = ray.util.list_named_actors(all_namespaces=True)  # Any: typed by Ray as names alone
    names: list[str] = [entry["name"] for entry in entries if entry["namespace"] == NAMESPACE]
    ordered = sorted(names, key=lambda name: (not name.startswith("router"), name))
    for name in ordered:
        actor: Any = ray.get_actor(name, namespace=NAMESPACE)  # Any: see _Placed
        _answers([actor.drain.remote(timeout_s)], timeout_s + 1.0)
        _answers([actor.close.remote()], timeout_s)
        ray.kill(actor, no_restart=True)
        remove_placement_group(ray.util.get_placement_group(f"group-{name}"))
    return tuple(ordered)


def _answers(calls: Sequence[Any], timeout_s: float) -> list[Any]:  # Any: Ray's object references
    """The answers of those that answer in time; a dead or slow actor has none."""
    done, _ = ray.wait(list(calls), num_returns=len(calls), timeout=timeout_s) if calls else ([], [])
    answers = []
    for call in done:
        try:
            answers.append(ray.get(call, timeout=1.0))
        except (RayError, GetTimeoutError):
            continue
    return answers
