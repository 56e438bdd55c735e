"""The target's output matrix cut to the ids that a draft may hold, and drawing from its logits.

A head over the whole vocabulary costs as much as many layers (49,152 rows of SmolLM2: eight of its thirty), and most
ids are hardly ever drafted. Logits are scattered to the target's ids before anything is drawn; only greedy requests
whose logits nothing changes take the largest reduced logit as it is.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from core.drafter_settings import DraftQuantisation
from core.records import SamplingParams
from decode.sampling.draft_noise import DraftDraw, DrawnToken, draw_draft
from engine.engine import Engine
from engine.linear import Linear, pack


class ReducedHead:
    """Hidden states as the target's head reads them → logits of `token_ids` → drawn tokens. Engine thread only."""

    def __init__(self, engine: Engine, token_ids: Tensor, quantisation: DraftQuantisation = "none") -> None:
        """token_ids: Tensor  # [draft vocabulary] int64, ascending, of the target's vocabulary"""
        with torch.inference_mode():
            self._product = Linear(pack(engine.output_rows(token_ids), quantisation), engine.weights.row_plan)
        self._token_ids = token_ids.to("cpu")
        self._target_vocab = engine.config.vocab_size
        self._wide = torch.empty(0, self._target_vocab)

    def __call__(self, hidden: Tensor) -> Tensor:
        """[rows, hidden_dim] → [rows, draft vocabulary] float32."""
        return self._product(hidden).float()

    def draw(self, draws: Sequence[DraftDraw], logits: Tensor) -> list[DrawnToken | None]:
        """Draw i from row i of `logits` [draws, draft vocabulary]. None where nothing can be drawn (NaN)."""
        drawn: list[DrawnToken | None] = [None] * len(draws)
        plain = [is_plain_argmax(draw) for draw in draws]
        if any(plain):
            best, place = logits.max(dim=-1)
            token_ids = self._token_ids[place.to("cpu")].tolist()
            for row, finite in enumerate(torch.isfinite(best).tolist()):
                if plain[row] and finite:
                    drawn[row] = DrawnToken(token_ids[row])
        others = [row for row in range(len(draws)) if not plain[row]]
        if others:
            rows = logits if len(others) == len(draws) else logits[others]
            found = draw_draft([draws[row] for row in others], self.to_target_ids(rows))
            for row, token in zip(others, found, strict=True):
                drawn[row] = token
        return drawn

    def to_target_ids(self, logits: Tensor) -> Tensor:
        """[rows, draft vocabulary] → [rows, target vocabulary]: other ids have no chance. Valid until the next call."""
        num_rows = logits.shape[0]
        with torch.inference_mode():
            if self._wide.shape[0] < num_rows:
                self._wide = torch.full((num_rows, self._target_vocab), -torch.inf)
            wide = self._wide[:num_rows]
            return wide.index_copy_(1, self._token_ids, logits.to("cpu"))


def is_plain_argmax(draw: DraftDraw) -> bool:
    """Whether the largest logit is what is drawn: greedy, and nothing of the pipeline changes or bans a logit."""
    if draw.history.grammar is not None:
        return False
    return takes_the_largest(draw.sampling, draw.history.num_output + len(draw.path))


def takes_the_largest(sampling: SamplingParams, num_output: int) -> bool:
    """Whether the draw behind `num_output` answer tokens is the largest raw logit, but for a grammar."""
    penalties = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
    return (
        sampling.greedy
        and penalties == (1.0, 0.0, 0.0)
        and not sampling.logit_bias
        and not any(sampling.bad_word_ids)
        and num_output >= sampling.min_tokens
    )
