"""How a drafter that samples draws: through the target's own pipeline, with the noise that its verification wants.

Invariant and typical mode: argmax_v(log d(v) + gumbel(seed, choice, position, v)), the *same* noise that the
target's draw at that position takes, so that they match with P ≥ (1 - TV) / (1 + TV) (Daliri, Musco, Suresh 2024).
Rejection and block mode, called rejection below: the independent DRAFT stream, and d itself beside the token.

Several children of one node are the largest of log d + gumbel, which is drawing without replacement from d (Kool,
van Hoof, Welling 2019); in invariant mode the first of them matches the target's draw most often.

Where the choice's history is under a grammar, d is what the grammar leaves of it: a drafter needs no code for that.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from core.records import SamplingParams, VerificationMode
from decode.sampling import sampler
from decode.sampling.arithmetic import Float64
from decode.sampling.history import TokenHistory
from decode.sampling.masking import masked_draws, without_min_tokens
from decode.sampling.noise import Stream, draft_stream, noise_key
from decode.sampling.step_items import DrawItem


@dataclass(frozen=True, slots=True)
class DraftDraw:
    """The draft tokens to draw from one logits row of the drafter.

    `position` is the token's absolute position; `history` is the choice's, committed; `path` holds the draft
    tokens between the two, so position = len(history.token_ids) + len(path). `lane` tells apart draws at one node
    that must be independent under rejection: of several drafters in one tree, or with replacement.
    """

    sampling: SamplingParams
    seed: int
    choice: int
    position: int
    verification: VerificationMode
    history: TokenHistory
    path: tuple[int, ...] = ()
    lane: int = 0


@dataclass(frozen=True, slots=True)
class DrawnToken:
    """`draft_probs` [vocabulary] float32 under rejection with a temperature, else None (one-hot, or not needed)."""

    token_id: int
    draft_probs: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class DrawnChildren:
    """Distinct children of one node, in the order drawn.

    `scores`, by which best-first trees rank: log_softmax(log d + gumbel) in invariant mode, at temperature 0
    log_softmax(logits). Under rejection with a temperature they are log d of each token, and may say only which
    child is drafted *below*, never which child is kept or tried first; `draft_probs` [vocabulary] float32 is d
    there, before any child was removed, and None elsewhere.
    """

    token_ids: tuple[int, ...]
    scores: tuple[float, ...]
    draft_probs: torch.Tensor | None = None


def draw_draft(draws: Sequence[DraftDraw], logits: torch.Tensor) -> list[DrawnToken | None]:
    """Draw i from row i of `logits` [draws, vocabulary], raw, indexed by target token ids.

    None where nothing can be drawn (NaN, or constraints that leave nothing): end that draft there.
    """
    rows = _rows(draws, logits)
    items = [_draw_item(draw, row) for row, draw in enumerate(draws)]
    walked = [row for row, draw in enumerate(draws) if not _needs_probs(draw)]
    sampled = [row for row, draw in enumerate(draws) if _needs_probs(draw)]
    drawn: dict[int, DrawnToken | None] = {}
    for row, walk in zip(walked, sampler.walk([items[row] for row in walked], rows), strict=True):
        drawn[row] = DrawnToken(walk.token_ids[0]) if walk.token_ids else None
    for row in sampled:
        drawn[row] = _draw_with_probs(items[row], rows)
    return [drawn[row] for row in range(len(draws))]


def draw_children(
    draws: Sequence[DraftDraw], logits: torch.Tensor, widths: Sequence[int]
) -> list[DrawnChildren | None]:
    """Up to widths[i] children from row i of `logits` [draws, vocabulary], raw, indexed by target token ids.

    Temperature 0: the largest logits, ties to the lower id. Else the largest of log d + gumbel; under rejection
    they are drawn without replacement (`Draft.without_replacement`). Fewer where d has fewer tokens. With width 1
    the child is that of `draw_draft`. None where nothing can be drawn.
    """
    rows = _rows(draws, logits)
    items = [_draw_item(draw, row) for row, draw in enumerate(draws)]
    walked = [row for row, draw in enumerate(draws) if not _needs_probs(draw)]
    found = sampler.children([items[row] for row in walked], [widths[row] for row in walked], rows)
    drawn: dict[int, DrawnChildren | None] = {
        row: None if children is None else DrawnChildren(children.token_ids, children.scores)
        for row, children in zip(walked, found, strict=True)
    }
    for row, item in enumerate(items):
        if row not in drawn:
            drawn[row] = _children_with_probs(item, rows, widths[row])
    return [drawn[row] for row in range(len(draws))]


def _needs_probs(draw: DraftDraw) -> bool:
    return _independent(draw) and not draw.sampling.greedy


def _independent(draw: DraftDraw) -> bool:
    """Whether verification weighs the draft by d, so that the target's noise must stay unknown to it."""
    return draw.verification in ("rejection", "block")


def _rows(draws: Sequence[DraftDraw], logits: torch.Tensor) -> torch.Tensor:
    rows = sampler.as_rows(logits)
    return masked_draws([draw.history for draw in draws], [draw.path for draw in draws], rows)


def _draw_item(draw: DraftDraw, row: int) -> DrawItem:
    masked = draw.history.grammar is not None
    return DrawItem(
        sampling=without_min_tokens(draw.sampling) if masked else draw.sampling,
        seed=draw.seed,
        choice=draw.choice,
        position=draw.position,
        history=draw.history,
        logits_row=row,
        stream=draft_stream(draw.lane, draw.path) if _independent(draw) else Stream.SHARED,
        path=draw.path,
    )


def _draw_with_probs(item: DrawItem, logits: torch.Tensor) -> DrawnToken | None:
    children = _children_with_probs(item, logits, 1)
    return None if children is None else DrawnToken(children.token_ids[0], children.draft_probs)


def _children_with_probs(item: DrawItem, logits: torch.Tensor, width: int) -> DrawnChildren | None:
    """Drawn from d as it is handed over: rounded to float32."""
    probs = sampler.probs(item, logits)
    if isinstance(probs, str):
        return None
    draft_probs = torch.from_numpy(probs).to(torch.float32)
    weights: Float64 = draft_probs.to(torch.float64).numpy()
    key = noise_key(item.seed, item.choice, item.position, item.stream)
    token_ids = sampler.earliest(weights, key, width)
    return DrawnChildren(tuple(token_ids), tuple(np.log(weights[token_ids]).tolist()), draft_probs)
