"""Rejection verification over trees: the distribution, not the text.

With t and d the target's and draft's distributions after the same pipeline. At a node try the children one after
another, in the order drawn: accept x if u · d(x) < t(x), which happens with probability min(1, t(x) / d(x)), and go
there; after rejecting x set t ← norm(max(0, t - d)). Where none is left draw from the remaining t. For one child that
is Leviathan et al. 2023 and Chen et al. 2023: P(accept) = 1 - TV(t, d), residual norm(max(0, t - d)), bonus t.

Siblings of independent draws keep their multiplicity, each trial with its own d: several drafters (Miao et al. 2023,
SpecInfer), or one that draws with replacement. Siblings drawn without replacement are distinct draws of one source:
behind a rejected x that source's d becomes norm(d without x), and without mass nothing of it is tried (Yang et al.
2024; Jeon et al. 2024; Chen et al. 2024). Deterministic proposals have a one-hot d: `draft_probs` None, or a one-hot
row in a tree where other nodes were sampled. A rejected one-hot leaves t without its token.

Why it is exact. Given what was tried before, x is a draw from d that nothing else depended on. So min(t, d) of the
mass of t is emitted by acceptance, and max(0, t - d), normalised the remaining t, by what follows; by induction over
the children the emitted token has the distribution t.

Draft, accept, residual and bonus take independent streams of the counter-based noise keyed by (seed, choice,
position, stream), and every trial at a position a number of its own, so a run is reproducible and no noise is used
twice: a position is decided once.

Fallbacks. A rejection with no residual mass can only be rounding (t ≤ d everywhere means t = d): t stays. A row of
`draft_probs` that is no distribution (NaN, inf, negative, no mass) says nothing about how its token was drawn: that
child is not tried. That looks at d only, never at the token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from decode.draft import Draft, VerifyItem
from decode.sampling import sampler
from decode.sampling.arithmetic import Float32, Float64
from decode.sampling.noise import Stream, noise_key
from decode.sampling.sampler import Walk
from decode.verification.distributions import accept_uniform, draft_probs_of, normalised, target_probs_at


@dataclass(frozen=True, slots=True)
class Trial:
    """One child to try. `draft_probs` [vocabulary] None: one-hot at `token_id`."""

    row: int
    token_id: int
    source: int
    draft_probs: Float32 | None


@dataclass(frozen=True, slots=True)
class Decision:
    """The child accepted, or None and the remaining t [vocabulary] to draw from; how many were tried."""

    accepted: Trial | None
    remaining: Float64
    num_tried: int


def try_children(
    target_probs: Float64,
    trials: Sequence[Trial],
    without_replacement: bool,
    uniform_of: Callable[[int], float],
) -> Decision:
    """Try `trials` in order on t [vocabulary]; `uniform_of(i)` is the number of trial i."""
    remaining = target_probs
    removed: dict[int, list[int]] = {}
    num_tried = 0
    for number, trial in enumerate(trials):
        gone = removed.setdefault(trial.source, [])
        draft_probs = None if trial.draft_probs is None else normalised(trial.draft_probs, gone)
        if without_replacement:
            gone.append(trial.token_id)
        if draft_probs is None and trial.draft_probs is not None:
            continue
        num_tried += 1
        draft_prob = 1.0 if draft_probs is None else float(draft_probs[trial.token_id])
        if uniform_of(number) * draft_prob < float(remaining[trial.token_id]):
            return Decision(trial, remaining, num_tried)
        remaining = residual_probs(remaining, draft_probs, trial.token_id)
    return Decision(None, remaining, num_tried)


def residual_probs(target_probs: Float64, draft_probs: Float64 | None, token_id: int) -> Float64:
    """norm(max(0, t - d)); t where that has no mass. `draft_probs` None: one-hot at `token_id`."""
    if draft_probs is None:
        residual = target_probs.copy()
        residual[token_id] = 0.0
    else:
        residual = np.maximum(target_probs - draft_probs, 0.0)
    total = float(residual.sum())
    if total <= 0.0:
        return target_probs
    residual /= total
    return residual


def verify_tree(item: VerifyItem, logits: torch.Tensor) -> Walk:
    """Walk one tree from its root: to the child accepted at each node, until none is."""
    draft_probs = draft_probs_of(item)
    accepted: list[int] = []
    drawn: list[int] = []
    while True:
        row = accepted[-1] if accepted else 0
        target_probs = target_probs_at(item, row, drawn, logits)
        if isinstance(target_probs, str):
            return Walk(tuple(accepted), tuple(drawn), target_probs)
        position = item.position + len(drawn)
        decision = try_children(
            target_probs,
            _trials(item.draft, draft_probs, row),
            item.draft.without_replacement,
            lambda trial: accept_uniform(item, position, trial),  # noqa: B023 (called at once)
        )
        if decision.accepted is None:
            stream = Stream.RESIDUAL if decision.num_tried else Stream.BONUS
            key = noise_key(item.seed, item.choice, position, stream)
            drawn += sampler.earliest(decision.remaining, key)
            return Walk(tuple(accepted), tuple(drawn))
        accepted.append(decision.accepted.row)
        drawn.append(decision.accepted.token_id)


def _trials(draft: Draft, draft_probs: Float32 | None, row: int) -> list[Trial]:
    """The children of `row`, in the order drawn."""
    return [
        Trial(
            row=node + 1,
            token_id=draft.token_ids[node],
            source=draft.sources[node] if draft.sources else 0,
            draft_probs=None if draft_probs is None else draft_probs[node],
        )
        for node, parent in enumerate(draft.parents)
        if parent == row
    ]
