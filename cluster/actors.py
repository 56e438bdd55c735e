"""The Ray actor around a worker's process. Ray starts it, restarts it after a crash, and ends it."""

from dataclasses import replace

import ray

from cluster.processes import die_with_parent
from cluster.specs import WorkerFailed, WorkerReady, WorkerSpec
from cluster.worker_process import WorkerProcess
from core.environment import remove_secrets


class WorkerActor:
    """One worker. Constructed anew, with the same spec, in a new process after every crash."""

    def __init__(self, spec: WorkerSpec) -> None:
        die_with_parent()
        remove_secrets()
        listen = spec.listen or f"{ray.util.get_node_ip_address()}:0"
        self._process = WorkerProcess(replace(spec, listen=listen))

    def wait_ready(self, timeout_s: float) -> WorkerReady | WorkerFailed:
        """See `WorkerProcess.wait_ready`."""
        return self._process.wait_ready(timeout_s)

    def drain(self, grace_s: float) -> int:
        """See `WorkerProcess.drain`."""
        return self._process.drain(grace_s)

    def close(self) -> None:
        """See `WorkerProcess.close`."""
        self._process.close()
