"""Typical acceptance (Medusa: Cai et al. 2024): approximate, so only for requests that allow it.

A drafted x is accepted where the target finds it likely enough: t(x) > min(ε, δ · exp(-H(t))), H the entropy of t in
nats and t the distribution after the whole pipeline, so that nothing banned or truncated is emitted. The longest
accepted path of the tree is taken, the first of several. The token behind it is drawn as in invariant mode: a step
emits at least that one, and without a draft the text is plain decoding's. At temperature 0 t is one-hot, so only its
argmax is accepted and the text is the greedy one.

How a token was drafted plays no part, so the answer follows the draft wherever the target is not surprised: its
distribution is not the target's.
"""

import numpy as np
import torch

from decode.draft import VerifyItem
from decode.sampling import sampler
from decode.sampling.arithmetic import Float64
from decode.sampling.noise import Stream
from decode.sampling.sampler import Walk
from decode.verification.distributions import draw_item, target_probs_at

EPSILON = 0.09
"""The most that is asked of a token. This and the next are the values of Medusa's published runs."""

DELTA = 0.3
"""The share of exp(-entropy) that is asked."""


def verify_typical(item: VerifyItem, logits: torch.Tensor) -> Walk:
    """Take the longest path whose tokens are all typical, and one token more."""
    rows = _longest_path(item, logits)
    path = [item.draft.token_ids[row - 1] for row in rows]
    last = rows[-1] if rows else 0
    (walk,) = sampler.walk([draw_item(item, last, path, Stream.SHARED)], logits)
    return Walk(rows, (*path, *walk.token_ids), walk.error)


def threshold(target_probs: Float64) -> float:
    """What t must give to a token that is to be accepted: min(ε, δ · exp(-H(t)))."""
    present = target_probs[target_probs > 0.0]
    entropy = -float((present * np.log(present)).sum())
    return min(EPSILON, DELTA * float(np.exp(-entropy)))


def _longest_path(item: VerifyItem, logits: torch.Tensor) -> tuple[int, ...]:
    """Rows of the path, root excluded."""
    draft = item.draft
    paths: dict[int, tuple[int, ...]] = {0: ()}
    bars: dict[int, tuple[Float64, float] | None] = {}
    longest: tuple[int, ...] = ()
    for node, (token_id, parent) in enumerate(zip(draft.token_ids, draft.parents, strict=True)):
        above = paths.get(parent)
        if above is None:
            continue
        if parent not in bars:
            bars[parent] = _bar(item, above, logits)
        bar = bars[parent]
        if bar is None or not bar[0][token_id] > bar[1]:
            continue
        paths[node + 1] = (*above, node + 1)
        if len(above) + 1 > len(longest):
            longest = paths[node + 1]
    return longest


def _bar(item: VerifyItem, rows: tuple[int, ...], logits: torch.Tensor) -> tuple[Float64, float] | None:
    """t [vocabulary] behind the path `rows`, and what it must give; None where nothing can be drawn."""
    path = [item.draft.token_ids[row - 1] for row in rows]
    target_probs = target_probs_at(item, rows[-1] if rows else 0, path, logits)
    return None if isinstance(target_probs, str) else (target_probs, threshold(target_probs))
