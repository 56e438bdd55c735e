"""The drafter that never drafts: plain decoding, and what every other drafter falls back to."""

from collections.abc import Sequence

from decode.draft import NO_DRAFT, Draft
from decode.drafters.protocol import DraftBudget, DrafterNeeds, DraftRequest, Observation


class NoneDrafter:
    """Holds no state and proposes nothing."""

    name = "none"
    needs = DrafterNeeds(max_draft_length=0, default_draft_length=0)

    def start(self, request: DraftRequest) -> None:
        """Nothing to take on."""

    def rebuild(self, request: DraftRequest) -> None:
        """Nothing to take on."""

    def prefill(self, max_rows: int) -> int:
        """No work of its own."""
        return 0

    def propose(self, budgets: Sequence[DraftBudget]) -> Sequence[Draft]:
        """No draft for anybody."""
        return [NO_DRAFT] * len(budgets)

    def observe(self, observations: Sequence[Observation]) -> None:
        """Nothing to learn."""

    def finish(self, request: DraftRequest) -> None:
        """Nothing to free."""

    def check(self) -> None:
        """Nothing that could be broken."""
