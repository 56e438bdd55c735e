"""How a drafter that samples draws: through the target's own pipeline, with the noise that its verification wants.

Invariant mode: argmax_v(log d(v) + gumbel(seed, choice, position, v)), the *same* noise that the target's draw at
that position takes, so that they match with P ≥ (1 - TV) / (1 + TV) (Daliri, Musco, Suresh 2024).
Rejection mode: the independent DRAFT stream, and the distribution that the token was really drawn from.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from core.records import SamplingParams, VerificationMode
from decode.sampling import sampler
from decode.sampling.history import TokenHistory
from decode.sampling.noise import Stream, noise_key
from decode.sampling.step_items import DrawItem


@dataclass(frozen=True, slots=True)
class DraftDraw:
    """One draft token to draw from a logits row of the drafter.

    `position` is the token's absolute position; `history` is the choice's, committed; `path` holds the draft
    tokens between the two, so position = len(history.token_ids) + len(path).
    """

    sampling: SamplingParams
    seed: int
    choice: int
    position: int
    verification: VerificationMode
    history: TokenHistory
    path: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class DrawnToken:
    """`draft_probs` [vocabulary] float32 in rejection mode with a temperature, else None (one-hot, or not needed)."""

    token_id: int
    draft_probs: torch.Tensor | None = None


def draw_draft(draws: Sequence[DraftDraw], logits: torch.Tensor) -> list[DrawnToken | None]:
    """Draw i from row i of `logits` [draws, vocabulary], raw, indexed by target token ids.

    None where nothing can be drawn (NaN, or constraints that leave nothing): end that draft there.
    """
    rows = sampler.as_rows(logits)
    items = [_draw_item(draw, row) for row, draw in enumerate(draws)]
    walked = [row for row, draw in enumerate(draws) if not _needs_probs(draw)]
    sampled = [row for row, draw in enumerate(draws) if _needs_probs(draw)]
    drawn: dict[int, DrawnToken | None] = {}
    for row, walk in zip(walked, sampler.walk([items[row] for row in walked], rows), strict=True):
        drawn[row] = DrawnToken(walk.token_ids[0]) if walk.token_ids else None
    for row in sampled:
        drawn[row] = _draw_with_probs(items[row], rows)
    return [drawn[row] for row in range(len(draws))]


def _needs_probs(draw: DraftDraw) -> bool:
    return draw.verification == "rejection" and not draw.sampling.greedy


def _draw_item(draw: DraftDraw, row: int) -> DrawItem:
    return DrawItem(
        sampling=draw.sampling,
        seed=draw.seed,
        choice=draw.choice,
        position=draw.position,
        history=draw.history,
        logits_row=row,
        stream=Stream.SHARED if draw.verification == "invariant" else Stream.DRAFT,
        path=draw.path,
    )


def _draw_with_probs(item: DrawItem, logits: torch.Tensor) -> DrawnToken | None:
    probs = sampler.probs(item, logits)
    if isinstance(probs, str):
        return None
    draft_probs = torch.from_numpy(probs).to(torch.float32)
    key = noise_key(item.seed, item.choice, item.position, item.stream)
    return DrawnToken(sampler.race(draft_probs.to(torch.float64).numpy(), key), draft_probs)
