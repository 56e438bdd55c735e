"""Rejection verification of chains (Leviathan et al. 2023; Chen et al. 2023): the distribution, not the text.

With t and d the target's and draft's distributions after the same pipeline: accept draft token x if
u · d(x) < t(x), which happens with probability min(1, t(x) / d(x)); at the first rejection draw from the
residual norm(max(0, t - d)); if all were accepted draw the bonus from t. P(accept) = 1 - TV(t, d).
`draft_probs` None: proposals were deterministic, d is one-hot.

Draft, accept, residual and bonus take independent streams of the counter-based noise keyed by (seed, choice,
position, stream), so a run is reproducible; each position is decided once, so no noise is used twice.

Fallbacks. A rejection with no residual mass can only be rounding (t ≤ d everywhere means t = d): draw from t.
A row of `draft_probs` that is no distribution (NaN, inf, negative, no mass) says nothing about how its token
was drawn: the chain is cut before it, and its position drawn from t. That looks at d only, never at the token.
"""

from dataclasses import dataclass

import numpy as np
import torch

from decode.draft import VerifyItem
from decode.sampling import sampler
from decode.sampling.arithmetic import Float32, Float64
from decode.sampling.noise import Stream, noise_key, uniform
from decode.sampling.sampler import Walk
from decode.sampling.step_items import DrawItem


@dataclass(frozen=True, slots=True)
class Decision:
    """What became of one draft token: accepted, or the token drawn instead."""

    accepted: bool
    token_id: int


def reject_or_accept(
    target_probs: Float64, draft_probs: Float32 | None, token_id: int, item: DrawItem
) -> Decision:
    """Decide the draft token at `item.position`. `draft_probs` None: one-hot at `token_id`."""
    draft_prob = 1.0 if draft_probs is None else float(draft_probs[token_id])
    accept_uniform = uniform(noise_key(item.seed, item.choice, item.position, Stream.ACCEPT))
    if accept_uniform * draft_prob < float(target_probs[token_id]):
        return Decision(True, token_id)
    residual = residual_weights(target_probs, draft_probs, token_id)
    key = noise_key(item.seed, item.choice, item.position, Stream.RESIDUAL)
    return Decision(False, sampler.earliest(residual, key)[0])


def residual_weights(target_probs: Float64, draft_probs: Float32 | None, token_id: int) -> Float64:
    """max(0, t - d), unnormalised; t where that has no mass."""
    if draft_probs is None:
        residual = target_probs.copy()
        residual[token_id] = 0.0
    else:
        residual = np.maximum(target_probs - draft_probs, 0.0)
    return residual if bool(residual.any()) else target_probs


def verify_chain(item: VerifyItem, logits: torch.Tensor) -> Walk:
    """Verify one chain. Raises ValueError for a tree: rejection here is for chains only."""
    if not item.draft.is_chain:
        raise ValueError("rejection verification takes chains only, got a tree")
    draft_probs = _draft_probs(item)
    drawn: list[int] = []
    num_accepted = 0
    while True:
        depth = len(drawn)
        draw = _draw_at(item, drawn)
        target_probs = sampler.probs(draw, logits)
        if isinstance(target_probs, str):
            return Walk(tuple(range(1, num_accepted + 1)), tuple(drawn), target_probs)
        at_end = depth == len(item.draft.token_ids)
        if at_end or not (draft_probs is None or _is_distribution(draft_probs[depth])):
            key = noise_key(item.seed, item.choice, draw.position, Stream.BONUS)
            drawn.append(sampler.earliest(target_probs, key)[0])
            break
        node_probs = None if draft_probs is None else draft_probs[depth]
        decision = reject_or_accept(target_probs, node_probs, item.draft.token_ids[depth], draw)
        drawn.append(decision.token_id)
        if not decision.accepted:
            break
        num_accepted += 1
    return Walk(tuple(range(1, num_accepted + 1)), tuple(drawn))


def _draw_at(item: VerifyItem, path: list[int]) -> DrawItem:
    """The pipeline at the chain's row behind `path`."""
    return DrawItem(
        sampling=item.sampling,
        seed=item.seed,
        choice=item.choice,
        position=item.position + len(path),
        history=item.history,
        logits_row=item.logits_start + len(path),
        stream=Stream.BONUS,
        path=tuple(path),
    )


def _draft_probs(item: VerifyItem) -> Float32 | None:
    """[nodes, vocabulary]; None: one-hot."""
    if item.draft.draft_probs is None:
        return None
    probs: Float32 = item.draft.draft_probs.detach().to(device="cpu", dtype=torch.float32).numpy()
    return probs


def _is_distribution(probs: Float32) -> bool:
    """Finite, not negative, with mass; NaN fails both comparisons."""
    smallest, total = float(probs.min()), float(probs.sum())
    return smallest >= 0.0 and 0.0 < total < float("inf")
