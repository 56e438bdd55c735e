"""How often a draft token can be the target's token, by the distributions that both are drawn from at one position."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from decode.sampling.arithmetic import Float64


@dataclass(frozen=True, slots=True)
class Coupling:
    """Of one position, or means over positions.

    `total_variation`: TV. `best`: 1 - TV, which rejection reaches (Leviathan et al. 2023) and nothing exceeds.
    `shared_noise`: how often invariant mode's draws from both with the same Gumbel noise agree, exactly.
    `bound`: (1 - TV) / (1 + TV), below which `shared_noise` never is (Daliri, Musco, Suresh 2024).
    """

    total_variation: float
    best: float
    shared_noise: float
    bound: float


def coupling_of(target_probs: Float64, draft_probs: Float64) -> Coupling:
    """Of two distributions [vocabulary], each summing to 1."""
    distance = 0.5 * float(np.abs(target_probs - draft_probs).sum())
    return Coupling(
        total_variation=distance,
        best=1.0 - distance,
        shared_noise=shared_noise_match(target_probs, draft_probs),
        bound=(1.0 - distance) / (1.0 + distance),
    )


def shared_noise_match(target_probs: Float64, draft_probs: Float64) -> float:
    """P(argmax(log t + g) = argmax(log d + g)) of one Gumbel noise g, for distributions t and d [vocabulary].

    Both draws are races of the same exponentials E: v wins both where E(w) ≥ E(v) · max(t(w) / t(v), d(w) / d(v)) for
    all w, so P = Σ_v 1 / Σ_w max(t(w) / t(v), d(w) / d(v)) over the v that both allow. The maximum is t's where
    t(w) / d(w) ≥ t(v) / d(v), so in the order of that ratio each inner sum is two running sums.
    """
    target, draft = _allowed(target_probs, draft_probs)
    from_here = np.cumsum(target[::-1])[::-1]
    before = np.cumsum(draft) - draft
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        matches = 1.0 / (from_here / target + before / draft)
    return float(matches[(target > 0.0) & (draft > 0.0)].sum())


def _allowed(target_probs: Float64, draft_probs: Float64) -> tuple[Float64, Float64]:
    """Both where either allows a token, by t / d ascending."""
    allowed = (target_probs > 0.0) | (draft_probs > 0.0)
    target, draft = target_probs[allowed], draft_probs[allowed]
    with np.errstate(divide="ignore", over="ignore"):
        order = np.argsort(target / draft, kind="stable")
    return target[order], draft[order]


def mean_coupling(couplings: Sequence[Coupling]) -> Coupling:
    """Means over positions, each figure's own: `bound` is the mean bound, not the bound of the mean TV.

    Raises ValueError for no positions.
    """
    if not couplings:
        raise ValueError("no position was measured")
    return Coupling(
        total_variation=fmean(one.total_variation for one in couplings),
        best=fmean(one.best for one in couplings),
        shared_noise=fmean(one.shared_noise for one in couplings),
        bound=fmean(one.bound for one in couplings),
    )
