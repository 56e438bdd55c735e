"""Approximate verification: draft tokens are kept while the target does not find them too unlikely.

Token x of a chain is kept while -log t(x) ≤ threshold; t is the target's own distribution there, before penalties and
temperature. At the first token beyond it, or behind the last one, the target draws as it does without a draft. That
is the rollback rule of BiLD (Kim et al. 2023, "Speculative decoding with big little decoder"). An infinite threshold
keeps everything. It changes what is said: only for requests that allow it.
"""

from collections.abc import Sequence

import torch

from decode.draft import VerifyItem
from decode.sampling import sampler
from decode.sampling.noise import Stream
from decode.sampling.sampler import LogprobRequest, Walk
from decode.verification.distributions import draw_item


def verify_relaxed(items: Sequence[VerifyItem], logits: torch.Tensor) -> list[Walk]:
    """One walk for each item, in order. Raises ValueError for a tree: this is for chains only."""
    if not all(item.draft.is_chain for item in items):
        raise ValueError("relaxed verification takes chains only, got a tree")
    requests = [
        LogprobRequest(item.logits_start + depth, token_id, 0)
        for item in items
        for depth, token_id in enumerate(item.draft.token_ids)
    ]
    logprobs = iter([row[0][1] if row else float("nan") for row in sampler.logprobs(requests, logits)])
    kept = [_num_kept([next(logprobs) for _ in item.draft.token_ids], item) for item in items]
    draws = [
        draw_item(item, count, item.draft.token_ids[:count], Stream.SHARED)
        for item, count in zip(items, kept, strict=True)
    ]
    return [
        Walk(
            tuple(range(1, count + 1)),
            (*item.draft.token_ids[:count], *walk.token_ids),
            walk.error,
        )
        for item, count, walk in zip(items, kept, sampler.walk(draws, logits), strict=True)
    ]


def _num_kept(logprobs: Sequence[float], item: VerifyItem) -> int:
    """Leading tokens within the threshold; a log-probability that is no number is beyond it."""
    threshold = item.rollback_threshold
    assert threshold is not None, "an item of relaxed verification has a threshold"
    for depth, logprob in enumerate(logprobs):
        if not -logprob <= threshold:
            return depth
    return len(logprobs)
