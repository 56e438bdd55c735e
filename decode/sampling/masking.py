"""Logits under a grammar: what may not come is -inf before anything else looks at the row.

In the pipeline (DESIGN §5) the mask stands between min_tokens and the temperature. Penalties and bias leave -inf as it
is, so it can as well be the first; and since the mask heeds min_tokens itself (a ban that would leave nothing gives
way to the grammar), `min_tokens` is taken out of the parameters. Log-probabilities in replies are raw, hence copies.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from core.records import SamplingParams
from decode.draft import Draft, VerifyItem
from decode.sampling.history import TokenConstraint, TokenHistory
from decode.sampling.pipeline import NOT_FINITE
from decode.sampling.sampler import Walk


def masked_items(items: Sequence[VerifyItem], logits: torch.Tensor) -> tuple[list[VerifyItem], torch.Tensor]:
    """`items`, all under grammars, with rows of their own: copies of theirs in `logits` [rows, vocabulary], masked."""
    moved: list[VerifyItem] = []
    num_rows = sum(1 + len(item.draft.token_ids) for item in items)
    masked = torch.empty((num_rows, logits.shape[1]), dtype=logits.dtype)
    start = 0
    for item in items:
        grammar = item.history.grammar
        assert grammar is not None, "an item without a grammar"
        moved.append(replace(item, sampling=without_min_tokens(item.sampling), logits_start=start))
        masks = [grammar.mask(path) for path in paths_of(item.draft)]
        raw = logits[item.logits_start : item.logits_start + len(masks)]
        _mask_into(masked[start : start + len(masks)], raw, masks)
        start += len(masks)
    return moved, masked


def masked_draws(
    histories: Sequence[TokenHistory], paths: Sequence[Sequence[int]], logits: torch.Tensor
) -> torch.Tensor:
    """`logits` [draws, vocabulary] of a drafter, row i behind histories[i] and paths[i]; a copy where any is masked."""
    if all(history.grammar is None for history in histories):
        return logits
    free = torch.ones(logits.shape[1], dtype=torch.bool)
    masks = [
        free if history.grammar is None else history.grammar.mask(path)
        for history, path in zip(histories, paths, strict=True)
    ]
    masked = torch.empty_like(logits)
    _mask_into(masked, logits, masks)
    return masked


def without_min_tokens(sampling: SamplingParams) -> SamplingParams:
    """For rows whose mask heeds it."""
    return replace(sampling, min_tokens=0) if sampling.min_tokens else sampling


def name_fault(item: VerifyItem, walk: Walk) -> Walk:
    """The walk of a masked item: where the grammar left nothing, its error says so.

    Where there is no mask behind the last accepted token, that token is the step's last: the next step draws behind it.
    """
    grammar = item.history.grammar
    if walk.error != NOT_FINITE or grammar is None:
        return walk
    last = walk.accepted_rows[-1] if walk.accepted_rows else 0
    mask = grammar.mask(paths_of(item.draft)[last])
    if mask is None:
        return Walk(walk.accepted_rows[:-1], walk.token_ids)
    return walk if bool(mask.any()) else replace(walk, error=grammar.fault)


def allowed_part(draft: Draft, grammar: TokenConstraint) -> Draft:
    """The draft without nodes that the grammar forbids or cannot look behind, and without what hangs on them.

    Legal for what was not sampled, and where the text is drawn whatever was proposed: see `Draft`.
    """
    paths = paths_of(draft)
    kept: list[int] = []
    rows = {0: 0}
    for node, (token_id, parent) in enumerate(zip(draft.token_ids, draft.parents, strict=True)):
        mask = grammar.mask(paths[parent]) if parent in rows else None
        if mask is not None and bool(mask[token_id]) and grammar.mask(paths[node + 1]) is not None:
            kept.append(node)
            rows[node + 1] = len(kept)
    if len(kept) == len(draft.token_ids):
        return draft
    auxiliary = _auxiliary_parents(draft, rows)
    return replace(
        draft,
        token_ids=tuple(draft.token_ids[node] for node in kept),
        parents=tuple(rows[draft.parents[node]] for node in kept),
        draft_probs=None if draft.draft_probs is None else draft.draft_probs[kept],
        sources=tuple(draft.sources[node] for node in kept) if draft.sources else (),
        auxiliary_token_ids=() if auxiliary is None else draft.auxiliary_token_ids,
        auxiliary_parents=auxiliary or (),
    )


def paths_of(draft: Draft) -> list[tuple[int, ...]]:
    """The draft tokens down to each row, the root's () first."""
    paths: list[tuple[int, ...]] = [()]
    for token_id, parent in zip(draft.token_ids, draft.parents, strict=True):
        paths.append((*paths[parent], token_id))
    return paths


def _auxiliary_parents(draft: Draft, rows: dict[int, int]) -> tuple[int, ...] | None:
    """Parents of the auxiliary rows among the nodes that are left; None: one of them hung on a node that is not."""
    num_nodes, num_left = len(draft.token_ids), len(rows) - 1
    parents: list[int] = []
    for parent in draft.auxiliary_parents:
        moved = rows.get(parent) if parent <= num_nodes else parent - num_nodes + num_left
        if moved is None:
            return None
        parents.append(moved)
    return tuple(parents)


def _mask_into(masked: torch.Tensor, logits: torch.Tensor, masks: Sequence[torch.Tensor | None]) -> None:
    """All [rows, vocabulary]; a mask None forbids everything: nobody comes there."""
    nothing = torch.zeros(logits.shape[1], dtype=torch.bool)
    allowed = torch.stack([nothing if mask is None else mask for mask in masks])
    torch.where(allowed, logits, torch.tensor(-torch.inf), out=masked)
