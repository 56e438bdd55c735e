"""Where a request runs: prefix overlap, bounded by load. Pure: snapshot in, decision out (CASES B44, S07)."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from core.records import PrefillPeer
from router.views import Placement, PromptView, WorkerView

AFFINITY_RATIO = 1.5
"""A worker keeps attracting requests by prefix while its load is at most this times the least loaded one's …"""
AFFINITY_SLACK = 1
"""… plus this. Together they keep loads under a flood of one prefix below 2:1 once there are a few requests."""
RAMP_S = 10.0
"""A worker that joins or rejoins counts as loaded as its least loaded peer at first, down to its true load then."""
MAX_PREFILL_PEERS = 3


@dataclass(frozen=True, slots=True)
class _Candidate:
    view: WorkerView
    load: float
    tie: int


def usable(view: WorkerView, prompt: PromptView) -> bool:
    """Whether a worker may take the request at all, whatever its load."""
    record = view.record
    return (
        record.ready
        and not record.draining
        and not view.suspected
        and record.epoch not in prompt.excluded
        and record.model_revision == prompt.model_revision
        and view.capacity_tokens >= prompt.num_tokens
        and (prompt.numerics_class is None or record.numerics_class == prompt.numerics_class)
    )


def choose_decode(workers: Sequence[WorkerView], prompt: PromptView) -> tuple[WorkerView, str] | None:
    """The decode worker and why, or None where nobody may take it.

    The longest remembered prefix wins among the workers that are not much busier than the least busy one; without a
    prefix the least busy one; among equals a hash of request and worker. Stale reports are not believed: such a
    worker is used only where no other is left.
    """
    able = [view for view in workers if usable(view, prompt) and _hosts(view, prompt.drafter)]
    candidates = _candidates(able, prompt.spread)
    if not candidates:
        return None
    least = min(candidate.load for candidate in candidates)
    bound = AFFINITY_RATIO * least + AFFINITY_SLACK
    near = [
        candidate
        for candidate in candidates
        if candidate.view.overlap_tokens >= candidate.view.record.block_size and candidate.load <= bound
    ]
    if near:
        best = max(
            near, key=lambda candidate: (candidate.view.overlap_tokens, -candidate.load, candidate.tie)
        )
        return best.view, f"prefix of {best.view.overlap_tokens} tokens"
    best = min(candidates, key=lambda candidate: (candidate.load, candidate.tie))
    busy = any(candidate.view.overlap_tokens for candidate in candidates)
    return best.view, "least busy; prefix holder too busy" if busy else "least busy"


def choose_prefill(
    workers: Sequence[WorkerView], decode: WorkerView, prompt: PromptView
) -> tuple[PrefillPeer, ...]:
    """The prefill workers that the attempt may fetch from, best first: numerics class and planes must fit."""
    record = decode.record
    able = [
        view
        for view in workers
        if usable(view, prompt)
        and view.record.numerics_class == record.numerics_class
        and set(record.hidden_layers) <= set(view.record.hidden_layers)
    ]
    candidates = _candidates(able, prompt.spread)
    if not candidates:
        return ()
    bound = AFFINITY_RATIO * min(candidate.load for candidate in candidates) + AFFINITY_SLACK
    ranked = sorted(
        candidates,
        key=lambda candidate: (
            -candidate.view.overlap_tokens if candidate.load <= bound else 0,
            candidate.load,
            candidate.tie,
        ),
    )
    chosen = [candidate.view.record for candidate in ranked[:MAX_PREFILL_PEERS]]
    return tuple(PrefillPeer(peer.worker_id, peer.epoch, peer.address) for peer in chosen)


def place(
    decode: Sequence[WorkerView], prefill: Sequence[WorkerView], prompt: PromptView
) -> Placement | None:
    """One attempt's workers, or None where no decode worker may take it."""
    found = choose_decode(decode, prompt)
    if found is None:
        return None
    view, reason = found
    return Placement(view.record, choose_prefill(prefill, view, prompt), view.overlap_tokens, reason)


def _hosts(view: WorkerView, drafter: str | None) -> bool:
    return drafter is None or drafter in view.record.drafters


def _candidates(views: Sequence[WorkerView], spread: int) -> list[_Candidate]:
    """Fresh workers (all, if none is fresh) with the load that counts."""
    chosen = [view for view in views if view.fresh] or list(views)
    return [
        _Candidate(view, _ramped_load(view, chosen), _tie(spread, view.record.worker_id)) for view in chosen
    ]


def _ramped_load(view: WorkerView, others: Sequence[WorkerView]) -> float:
    """A newcomer's load rises to the least loaded peer's, less as it grows older; so nobody floods it."""
    if view.seen_s >= RAMP_S:
        return float(view.load)
    peers = [other.load for other in others if other is not view and other.seen_s >= RAMP_S]
    if not peers:
        return float(view.load)
    return max(float(view.load), min(peers) * (1.0 - view.seen_s / RAMP_S))


def _tie(spread: int, worker_id: str) -> int:
    digest = hashlib.blake2b(f"{spread}:{worker_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
