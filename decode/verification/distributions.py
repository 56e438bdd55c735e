"""What verification weighs: the target's and the draft's distributions at the nodes of one choice's draft."""

from collections.abc import Sequence

import numpy as np
import torch

from decode.draft import VerifyItem
from decode.sampling import sampler
from decode.sampling.arithmetic import Float32, Float64
from decode.sampling.noise import Stream, noise_key, uniform
from decode.sampling.step_items import DrawItem


def draw_item(item: VerifyItem, row: int, path: Sequence[int], stream: Stream) -> DrawItem:
    """The pipeline at `row` of the item's tree (0: root), behind the draft tokens `path` that lead there."""
    return DrawItem(
        sampling=item.sampling,
        seed=item.seed,
        choice=item.choice,
        position=item.position + len(path),
        history=item.history,
        logits_row=item.logits_start + row,
        stream=stream,
        path=tuple(path),
    )


def target_probs_at(item: VerifyItem, row: int, path: Sequence[int], logits: torch.Tensor) -> Float64 | str:
    """t at `row`: [vocabulary] float64, or the constraint that leaves nothing to draw."""
    return sampler.probs(draw_item(item, row, path, Stream.BONUS), logits)


def draft_probs_of(item: VerifyItem) -> Float32 | None:
    """[nodes, vocabulary]; None: all proposals were deterministic, each node's d is one-hot at its token."""
    if item.draft.draft_probs is None:
        return None
    probs: Float32 = item.draft.draft_probs.detach().to(device="cpu", dtype=torch.float32).numpy()
    return probs


def normalised(probs: Float32, removed: Sequence[int] = ()) -> Float64 | None:
    """d [vocabulary] as float64 summing to 1, without the tokens `removed`; None where nothing is left.

    None also for what is no distribution (NaN, inf, a negative value): it says nothing about how a token was drawn.
    """
    smallest = float(probs.min())
    weights = probs.astype(np.float64)
    total = float(weights.sum())
    if not (smallest >= 0.0 and 0.0 < total < float("inf")):
        return None
    if removed:
        weights[list(removed)] = 0.0
        total = float(weights.sum())
    if total <= 0.0:
        return None
    weights /= total
    return weights


def accept_uniform(item: VerifyItem, position: int, trial: int) -> float:
    """The number in (0, 1) of one trial at an absolute position: no other trial of the answer may use it."""
    return uniform(noise_key(item.seed, item.choice, position, Stream.ACCEPT), trial)
