"""Block verification of chains (Sun et al. 2024, "Block Verification Accelerates Speculative Decoding").

The distribution, not the text, as rejection verification, but the chain is judged as a whole: in expectation at least
as many tokens are accepted. They prove that no exact verifier of single chains accepts more in a step.

With the chain X_1 … X_K, t_i and d_{i+1} the target's and draft's distributions behind X_1 … X_i, and p_0 = 1:

    p_{i+1} = min(1, p_i · t_i(X_{i+1}) / d_{i+1}(X_{i+1}))
    S_i     = Σ_x max(0, p_i · t_i(x) - d_{i+1}(x))
    h_i     = S_i / (S_i + 1 - p_i)  for 0 < i < K;   h_K = p_K

accept the longest beginning X_1 … X_i whose own coin, u_i < h_i, says so (i = 0 where none does). Behind it draw from
norm(max(0, p_i · t_i - d_{i+1})), or from t_K where all K are accepted.

Why it is exact. Let N be the number accepted. P(N ≥ i | X_1 … X_i) = p_i: true at K by h_K, and from i + 1 to i because
Σ_x d_{i+1}(x) · p_{i+1}(x) = Σ_x min(d_{i+1}, p_i · t_i) = p_i - S_i, so that

    P(N ≥ i | X_1 … X_i) = h_i + (1 - h_i) · (p_i - S_i) = p_i.

So P(N = i | X_1 … X_i) = p_i - (p_i - S_i) = S_i, the mass of what is drawn from then. Given N ≥ i the token behind
X_i therefore is y with the weight min(d_{i+1}(y), p_i · t_i(y)) by acceptance plus max(0, p_i · t_i(y) - d_{i+1}(y)) by
the draw, together p_i · t_i(y). Token-wise rejection accepts X_1 … X_i with Π min(1, t / d), which is never above p_i.

The coins of tokens that are given up have been looked at, and so has the draft behind them, though their positions are
decided later. The coin of X_i therefore carries i beside its position, and draft noise its path: a step has a root of
its own, so neither is used twice.

Fallbacks are those of rejection: a row of `draft_probs` that is no distribution ends the chain before it, and so does a
position where constraints leave nothing to draw. Where S_i = 0 and p_i = 1, t_i equals d_{i+1} and the chain goes on.
"""

from dataclasses import dataclass

import numpy as np
import torch

from decode.draft import VerifyItem
from decode.sampling import sampler
from decode.sampling.arithmetic import Float32, Float64
from decode.sampling.noise import Stream, noise_key
from decode.sampling.sampler import Walk
from decode.verification.distributions import accept_uniform, draft_probs_of, normalised, target_probs_at


@dataclass(frozen=True, slots=True)
class _End:
    """Where the answer would leave the chain: behind `length` tokens, drawing from `weights`, or the error there."""

    length: int
    weights: Float64 | str
    stream: Stream


def verify_block(item: VerifyItem, logits: torch.Tensor) -> Walk:
    """Verify one chain. Raises ValueError for a tree."""
    if not item.draft.is_chain:
        raise ValueError("block verification takes chains only, got a tree")
    end = _longest(item, logits)
    token_ids = item.draft.token_ids[: end.length]
    rows = tuple(range(1, end.length + 1))
    if isinstance(end.weights, str):
        return Walk(rows, token_ids, end.weights)
    key = noise_key(item.seed, item.choice, item.position + end.length, end.stream)
    return Walk(rows, (*token_ids, *sampler.earliest(end.weights, key)))


def _longest(item: VerifyItem, logits: torch.Tensor) -> _End:
    draft_probs = draft_probs_of(item)
    token_ids = item.draft.token_ids
    kept_prob = 1.0
    end: _End | None = None
    for length in range(len(token_ids) + 1):
        target_probs = target_probs_at(item, length, token_ids[:length], logits)
        node_probs = None
        if length < len(token_ids) and not isinstance(target_probs, str):
            node_probs = _node_probs(draft_probs, length, token_ids[length], target_probs.size)
        if isinstance(target_probs, str) or node_probs is None:
            if end is None or _coin(item, length) < kept_prob:
                end = _End(length, target_probs, Stream.BONUS)
            break
        accept_prob, excess = stop_prob(kept_prob, target_probs, node_probs)
        if end is None or _coin(item, length) < accept_prob:
            end = _End(length, excess, Stream.RESIDUAL)
        token_id = token_ids[length]
        kept_prob = next_kept_prob(kept_prob, float(target_probs[token_id]), float(node_probs[token_id]))
        if kept_prob == 0.0:
            break
    assert end is not None
    return end


def _coin(item: VerifyItem, length: int) -> float:
    """u_i of the chain's first `length` tokens."""
    return accept_uniform(item, item.position + length - 1, length)


def _node_probs(draft_probs: Float32 | None, node: int, token_id: int, vocabulary: int) -> Float64 | None:
    """d [vocabulary] of a node; None where its row is no distribution."""
    if draft_probs is not None:
        return normalised(draft_probs[node])
    one_hot = np.zeros(vocabulary)
    one_hot[token_id] = 1.0
    return one_hot


def stop_prob(kept_prob: float, target_probs: Float64, draft_probs: Float64) -> tuple[float, Float64]:
    """h_i, and max(0, p_i · t_i - d_{i+1}) [vocabulary], unnormalised; t_i where that has no mass."""
    excess = np.maximum(kept_prob * target_probs - draft_probs, 0.0)
    mass = float(excess.sum())
    if mass <= 0.0:
        return (1.0 if kept_prob == 1.0 else 0.0), target_probs
    return mass / (mass + (1.0 - kept_prob)), excess


def next_kept_prob(kept_prob: float, target_prob: float, draft_prob: float) -> float:
    """p_{i+1} of the drafted token."""
    scaled = kept_prob * target_prob
    if scaled <= 0.0:
        return 0.0
    return 1.0 if scaled >= draft_prob else scaled / draft_prob
