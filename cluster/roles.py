"""What the three kinds of worker have in common, as their process sees them, and which one to build."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from cluster.specs import WorkerSpec
from core.control_state import ControlState
from core.environment import cache_directory
from core.grpc_server import RpcServer
from core.identity import WorkerIdentity
from core.metrics import MetricsServer
from core.model_store import resolve_model
from core.records import WorkerRecord


class Role(Protocol):
    """A worker that was built: its services are on the server, its model is loaded and warm."""

    def record(self) -> WorkerRecord:
        """What the registry is told now. Cheap; called at every heartbeat."""
        ...

    def healthy(self) -> bool:
        """Whether the engine thread has finished a step, or idled, within `engine_stall_s`."""
        ...

    def beyond_help(self) -> bool:
        """Whether it can never be healthy again, so that its process is to end at once."""
        ...

    async def drain(self, grace_s: float) -> int:
        """No new work; waits at most `grace_s` for what runs. Returns what is left."""
        ...

    async def close(self) -> None:
        """Ends what runs and gives everything back. Called once."""
        ...


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a process has at hand for its role. `rpc` is bound, and does not answer yet."""

    identity: WorkerIdentity
    state: ControlState
    metrics: MetricsServer
    rpc: RpcServer


def model_directory(spec: WorkerSpec) -> Path:
    """Where the deployment's model lies on this node; fetches it where it is an alias not there yet."""
    return resolve_model(spec.settings.model, cache_directory())


async def build_role(spec: WorkerSpec, around: Surroundings) -> Role:
    """Loads and warms what the role needs and puts its services on the server.

    Each role is imported where it is built: a router's process never loads torch.
    """
    if spec.role == "prefill":
        from cluster.prefill_role import PrefillRole

        return await PrefillRole.build(spec, around)
    if spec.role == "decode":
        from cluster.decode_role import DecodeRole

        return await DecodeRole.build(spec, around)
    from cluster.router_role import RouterRole

    return await RouterRole.build(spec, around)
