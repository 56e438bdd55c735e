"""Big Little Decoder: the draft model speaks as long as it is sure, the target corrects what it finds too unlikely.

Kim et al. 2023, "Speculative decoding with big little decoder". *Fallback*: the small model stops where its largest
probability is below `fallback_threshold`, and the target draws that token. *Rollback*: the target looks at all tokens
of the small model in one forward and takes back the first one with -log t(x) > `rollback_threshold`, and what follows.
Here both are one step: a draft that ends at the fallback, and `verification/relaxed.py`. A draft ends after
`max_draft_length` tokens as well. Approximate: refused unless the request allows it.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from core.drafter_settings import BildSettings
from decode.drafters.draft_model import DraftModelDrafter
from decode.drafters.protocol import DraftRequest


class BildDrafter(DraftModelDrafter):
    """Drafts with the model of a `DraftModelDrafter`, whose KV pool it shares."""

    name = "bild"

    def __init__(self, draft: DraftModelDrafter, settings: BildSettings) -> None:
        super().__init__(draft._engine, draft._settings, draft._num_token_ids, draft._target_vocab)
        self.parts = (draft,)
        self._fallback_threshold = settings.fallback_threshold
        self.needs = replace(
            self.needs,
            max_draft_length=settings.max_draft_length,
            default_draft_length=min(settings.draft_length, settings.max_draft_length),
            rollback_threshold=settings.rollback_threshold,
            max_draft_width=1,
            default_draft_width=1,
        )

    def _end_before(self, requests: Sequence[DraftRequest], logits: Tensor) -> list[bool]:
        """The fallback rule."""
        return [not confidence >= self._fallback_threshold for confidence in confidences(logits)]


def confidences(logits: Tensor) -> list[float]:
    """The largest probability of each row, at temperature 1: [rows, vocabulary] → rows numbers."""
    largest: list[float] = torch.softmax(logits, dim=-1).amax(dim=-1).tolist()
    return largest
