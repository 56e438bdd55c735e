"""One verification call a step: any mix of modes and parameters; each row depends on itself only."""

from collections.abc import Callable, Mapping, Sequence

import torch

from core.records import TokenLogprobs, VerificationMode
from decode.draft import Verdict, VerifyItem
from decode.sampling import sampler
from decode.sampling.masking import masked_items, name_fault
from decode.sampling.sampler import LogprobRequest, Walk
from decode.verification.block import verify_block
from decode.verification.invariant import invariant_draw
from decode.verification.rejection import verify_tree
from decode.verification.relaxed import verify_relaxed
from decode.verification.typical import verify_typical

_WEIGHERS: Mapping[VerificationMode, Callable[[VerifyItem, torch.Tensor], Walk]] = {
    "rejection": verify_tree,
    "block": verify_block,
    "typical": verify_typical,
}
"""Modes that weigh drafts by dense distributions, one choice at a time."""


def verify(items: Sequence[VerifyItem], logits: torch.Tensor) -> list[Verdict]:
    """One verdict for each item, in order. `logits` [rows, vocabulary] float32, raw; not changed.

    Raises ValueError for a tree under block or relaxed verification. NaN, inf or constraints that leave nothing become
    `Verdict.error` of that item alone.
    """
    rows = sampler.as_rows(logits)
    free = [index for index, item in enumerate(items) if item.history.grammar is None]
    masked = [index for index, item in enumerate(items) if item.history.grammar is not None]
    walks = dict(zip(free, _walks([items[index] for index in free], rows), strict=True))
    if masked:
        moved = masked_items([items[index] for index in masked], rows)
        walks |= zip(masked, map(name_fault, moved[0], _walks(*moved)), strict=True)
    ordered = [walks[index] for index in range(len(items))]
    logprobs = _logprobs(items, ordered, rows)
    return [
        Verdict(walk.accepted_rows, walk.token_ids, tokens, walk.error)
        for walk, tokens in zip(ordered, logprobs, strict=True)
    ]


def _walks(items: Sequence[VerifyItem], rows: torch.Tensor) -> list[Walk]:
    """One walk for each item, each mode by its own rule."""
    relaxed = [index for index, item in enumerate(items) if item.rollback_threshold is not None]
    walks: dict[int, Walk] = dict(
        zip(relaxed, verify_relaxed([items[index] for index in relaxed], rows), strict=True)
    )
    invariant = [
        index for index, item in enumerate(items) if item.verification == "invariant" and index not in walks
    ]
    drawn = sampler.walk([invariant_draw(items[index]) for index in invariant], rows)
    walks.update(zip(invariant, drawn, strict=True))
    for index, item in enumerate(items):
        if index not in walks:
            walks[index] = _WEIGHERS[item.verification](item, rows)
    return [walks[index] for index in range(len(items))]


def _logprobs(
    items: Sequence[VerifyItem], walks: Sequence[Walk], logits: torch.Tensor
) -> list[tuple[TokenLogprobs, ...]]:
    """Of every emitted token, where asked for: the target's raw log-softmax, before penalties and temperature."""
    requests: list[LogprobRequest] = []
    for item, walk in zip(items, walks, strict=True):
        if item.sampling.logprobs is None:
            continue
        rows = (0, *walk.accepted_rows)
        for row, token_id in zip(rows, walk.token_ids, strict=False):
            requests.append(LogprobRequest(item.logits_start + row, token_id, item.sampling.logprobs))
    answers = iter(sampler.logprobs(requests, logits))
    tokens: list[tuple[TokenLogprobs, ...]] = []
    for item, walk in zip(items, walks, strict=True):
        wanted = 0 if item.sampling.logprobs is None else len(walk.token_ids)
        tokens.append(tuple(_token_logprobs(next(answers)) for _ in range(wanted)))
    return tokens


def _token_logprobs(entries: list[tuple[int, float]]) -> TokenLogprobs:
    (token_id, logprob), *best = entries
    return TokenLogprobs(token_id, logprob, tuple(best))
