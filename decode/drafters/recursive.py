"""Speculation under speculation: n-grams guess what the draft model would draft, and it checks a guess in one forward.

The draft is token by token the draft model's own, but for what quantised weights round otherwise for many rows: at
every row of the guess the model draws as it would have, with the same noise, and the first draw that is not the token
guessed ends the guess. Only the number of its forwards falls.
Method: speculative decoding of the draft model itself (as in cascade speculative drafting, Chen et al. 2023).
"""

from collections.abc import Sequence
from dataclasses import replace

from core.drafter_settings import RecursiveSettings
from decode.draft import Draft
from decode.drafters.draft_model import DraftModelDrafter
from decode.drafters.ngram import NgramDrafter
from decode.drafters.protocol import DraftBudget, Drafter, DraftRequest, Observation


class RecursiveDrafter:
    """Chains only. `base` is the hosted draft model; the n-grams are its own."""

    name = "recursive"

    def __init__(self, base: DraftModelDrafter, settings: RecursiveSettings) -> None:
        self._base = base
        self._ngram = NgramDrafter(settings.ngram)
        self._guess_length = settings.guess_length
        self.needs = replace(base.needs, max_draft_width=1, default_draft_width=1)

    @property
    def parts(self) -> tuple[Drafter, ...]:
        """What it drafts with."""
        return (self._base,)

    def start(self, request: DraftRequest) -> None:
        """Both take the choice on."""
        self._ngram.start(request)
        self._base.start(request)

    def rebuild(self, request: DraftRequest) -> None:
        """Both take the choice on again."""
        self._ngram.rebuild(request)
        self._base.rebuild(request)

    def prefill(self, max_rows: int) -> int:
        """The draft model's own prompt work."""
        return self._base.prefill(max_rows)

    def propose(self, budgets: Sequence[DraftBudget]) -> Sequence[Draft]:
        """The draft model's chains."""
        guesses = self._ngram.propose(
            [DraftBudget(budget.request, self._guess_length, self._guess_length) for budget in budgets]
        )
        return self._base.propose_guessed(budgets, [guess.token_ids for guess in guesses])

    def observe(self, observations: Sequence[Observation]) -> None:
        """Both learn what was emitted."""
        self._ngram.observe(observations)
        self._base.observe(observations)

    def finish(self, request: DraftRequest) -> None:
        """Both forget the choice."""
        self._ngram.finish(request)
        self._base.finish(request)

    def check(self) -> None:
        """Its n-grams hold nothing; the draft model, being hosted too, checks itself."""
        self._ngram.check()
