"""What the workers of a served system hold, and waiting until that is nothing."""

from dataclasses import dataclass

from cluster.local import LocalCluster


@dataclass(frozen=True, slots=True)
class Held:
    """Summed over the workers, each asked itself."""

    running: int = 0
    waiting: int = 0
    leases: int = 0
    tasks: int = 0
    used_blocks: int = 0


NOTHING = Held()


def held(cluster: LocalCluster) -> Held:
    """What is held now. Raises ServiceError where a worker that the router knows does not answer."""
    names = [worker.worker_id for worker in cluster.workers() if worker.role in {"prefill", "decode"}]
    statuses = [
        cluster.worker("prefill" if name.startswith("prefill") else "decode", int(name.rsplit("-", 1)[1]))
        for name in names
    ]
    return Held(
        running=sum(status.running for status in statuses),
        waiting=sum(status.waiting for status in statuses),
        leases=sum(status.leases for status in statuses),
        tasks=sum(status.tasks for status in statuses),
        used_blocks=sum(status.used_blocks for status in statuses),
    )


def wait_until_nothing_is_held(cluster: LocalCluster, timeout_s: float = 30.0) -> None:
    """Raises DeadlineExceeded where something stays held."""
    cluster.wait_until(lambda: True if held(cluster) == NOTHING else None, timeout_s, "nothing held")
