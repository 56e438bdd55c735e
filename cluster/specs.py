"""What a worker's process is told when it starts, and what it answers. Plain data: this is all that Ray carries."""

from dataclasses import dataclass

from core.records import WorkerRole
from core.settings import ServeSettings


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One worker of a deployment. Lives through restarts; the epoch does not and is drawn by the process."""

    worker_id: str
    role: WorkerRole
    settings: ServeSettings
    redis_url: str
    listen: str | None  # HOST:PORT to bind, port 0 for any; None: any port of the node's own address


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """A worker that loaded, warmed and answers."""

    worker_id: str
    epoch: str
    address: str
    process_id: int
    metrics_address: str


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    """A worker that could not start, and why; its process ends soon after."""

    worker_id: str
    reason: str


def worker_specs(settings: ServeSettings, redis_url: str, host: str | None) -> tuple[WorkerSpec, ...]:
    """All workers of a deployment, the router last and on its own address.

    Prefill and decode listen on any port of `host`; None: of the node that each is placed on. On one host the
    router has the metrics port that is named, the workers the following ones.
    """
    listen = None if host is None else f"{host}:0"
    names: list[tuple[str, WorkerRole]] = [
        (f"prefill-{index}", "prefill") for index in range(settings.prefill)
    ]
    names += [(f"decode-{index}", "decode") for index in range(settings.decode)]

    def own(place: int) -> ServeSettings:
        port = settings.telemetry.metrics_port
        if host is None or not port:
            return settings
        telemetry = settings.telemetry.model_copy(update={"metrics_port": port + place})
        return settings.model_copy(update={"telemetry": telemetry})

    workers = (
        WorkerSpec(name, role, own(place), redis_url, listen)
        for place, (name, role) in enumerate(names, start=1)
    )
    return (*workers, WorkerSpec("router-0", "router", own(0), redis_url, settings.listen))
