"""A cascade of two models: easy answers are the draft model's, hard ones become the target's.

The draft model writes while the mean of its largest probabilities over the answer stays at `confidence_threshold` or
above; once it is below, the target writes the rest alone. That is deferral by mean token confidence (Gupta et al.
2024, "Language model cascades: token-level uncertainty and beyond") in a cascade of a cheap and a dear model (Chen,
Zaharia, Zou 2023, "FrugalGPT"), decided while the answer is written instead of after it.

While the answer is easy every draft token is kept (`rollback_threshold` infinite); the target's forward over a draft of
K tokens keeps its KV ready to take over, and draws one token in K + 1. Approximate: refused unless the request
allows it. A choice that is preempted or resumed begins as easy again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from core.drafter_settings import CascadeSettings
from decode.draft import NO_DRAFT, Draft
from decode.drafters.bild import confidences
from decode.drafters.draft_model import DraftModelDrafter
from decode.drafters.protocol import DraftBudget, DraftRequest, Observation


@dataclass(slots=True)
class _Confidence:
    total: float = 0.0
    num_tokens: int = 0

    @property
    def mean(self) -> float:
        return self.total / self.num_tokens


class CascadeDrafter(DraftModelDrafter):
    """Drafts with the model of a `DraftModelDrafter`, whose KV pool it shares."""

    name = "cascade"

    def __init__(self, draft: DraftModelDrafter, settings: CascadeSettings) -> None:
        super().__init__(draft._engine, draft._settings, draft._num_token_ids, draft._target_vocab)
        self.parts = (draft,)
        self._threshold = settings.confidence_threshold
        self._first_tokens = settings.first_tokens
        self._easy: dict[int, _Confidence] = {}
        self.needs = replace(
            self.needs,
            max_draft_length=settings.max_draft_length,
            default_draft_length=min(settings.draft_length, settings.max_draft_length),
            rollback_threshold=float("inf"),
            max_draft_width=1,
            default_draft_width=1,
        )

    def start(self, request: DraftRequest) -> None:
        """Take a choice on, as easy; its prompt waits for `prefill`."""
        super().start(request)
        self._easy[request.key] = _Confidence()

    def propose(self, budgets: Sequence[DraftBudget]) -> Sequence[Draft]:
        """Chains for easy choices, none for hard ones. What has become hard gives the draft's cache back."""
        drafts: list[Draft] = [NO_DRAFT] * len(budgets)
        places = [index for index, budget in enumerate(budgets) if budget.request.key in self._easy]
        found = super().propose([budgets[index] for index in places])
        for index, draft in zip(places, found, strict=True):
            drafts[index] = draft
        return drafts

    def observe(self, observations: Sequence[Observation]) -> None:
        """Of easy choices."""
        super().observe([one for one in observations if self._still_easy(one.request)])

    def finish(self, request: DraftRequest) -> None:
        """Free the cache of a choice."""
        self._easy.pop(request.key, None)
        super().finish(request)

    def check(self) -> None:
        """Called when idle: nothing may be left."""
        super().check()
        if self._easy:
            raise AssertionError(f"cascade keeps {len(self._easy)} finished requests")

    def is_easy(self, request: DraftRequest) -> bool:
        """Whether the draft model writes the answer of a choice."""
        return request.key in self._easy

    def _end_before(self, requests: Sequence[DraftRequest], logits: Tensor) -> list[bool]:
        """Takes the confidences in; ends the chain where the answer is hard from this token on."""
        ends: list[bool] = []
        for request, confidence in zip(requests, confidences(logits), strict=True):
            seen = self._easy[request.key]
            seen.total += confidence
            seen.num_tokens += 1
            ends.append(self._is_hard(seen))
        return ends

    def _is_hard(self, seen: _Confidence) -> bool:
        return seen.num_tokens >= self._first_tokens and not seen.mean >= self._threshold

    def _still_easy(self, request: DraftRequest) -> bool:
        """False, and all state gone, once the choice is hard."""
        seen = self._easy.get(request.key)
        if seen is None:
            return False
        if self._is_hard(seen):
            self.finish(request)
            return False
        return True
