"""How a hand-off fails, and what came of one.

HandoffFailed
├── PeerUnavailable    not reachable, draining, another life than the one asked for, or it died
├── PeerRefused        it answered with an error of ours; `error` holds it
├── ChecksumFailed     bytes arrived damaged, or are not what was asked for
└── ProgressTimeout    a started transfer fell silent
"""

from dataclasses import dataclass

from torch import Tensor

from core.errors import ServiceError


class HandoffFailed(Exception):
    """Base of all. Nothing that was written may be used."""


class PeerUnavailable(HandoffFailed):
    """Try another peer, or prefill here."""


class PeerRefused(HandoffFailed):
    """The peer refused this request; `error` says why."""

    def __init__(self, error: ServiceError) -> None:
        super().__init__(error.message)
        self.error = error


class ChecksumFailed(HandoffFailed):
    """One more Fetch is worth trying."""


class ProgressTimeout(HandoffFailed):
    """Treated like a dead peer."""


@dataclass(frozen=True, slots=True)
class FetchResult:
    """logits: Tensor  # [vocabulary] float32 of the last prompt token, before any processing

    `bytes`: plane bytes taken in. `blocks`: blocks that they belong to. `cached_tokens`: found in the prefill
    worker's prefix cache. `prefill_s`: from its first step to its last.
    """

    logits: Tensor
    bytes: int
    blocks: int
    cached_tokens: int
    prefill_s: float
