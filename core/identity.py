"""Who a process is, for as long as it lives."""

import secrets
from dataclasses import dataclass

from core.records import WorkerRole


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """A worker's name and life. `epoch` is 128 random bits in hex: a restarted worker has another."""

    worker_id: str
    role: WorkerRole
    epoch: str
    address: str = ""


def new_epoch() -> str:
    """128 random bits in hex."""
    return secrets.token_hex(16)
