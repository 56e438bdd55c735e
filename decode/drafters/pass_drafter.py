"""`pass`: the chains of another drafter, for a target in two stages that is drafted for ahead of time.

While the last stage verifies a burst, the first one drafts and begins the next one on the guess that all of it is
accepted. Only the step knows of that; to a drafter these are proposals like any other. Drafting while the target
verifies: PipeInfer (Butler et al. 2024), PEARL (Liu et al. 2024).
"""

from collections.abc import Sequence
from dataclasses import replace

from core.records import PASS_DRAFTER
from decode.draft import Draft
from decode.drafters.protocol import DraftBudget, Drafter, DraftRequest, Observation


class PassDrafter:
    """Another name for `inner`, by which the step knows the choices that may be drafted for ahead.

    It holds no state: `inner` keeps that of its own choices and of these apart by their keys.
    """

    name = PASS_DRAFTER

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner
        self.needs = replace(inner.needs, max_draft_width=1, default_draft_width=1)

    @property
    def parts(self) -> tuple[Drafter, ...]:
        """See `decode.self_check.Composed`: with a head that does not fit its target this drafter goes, too."""
        return (self.inner,)

    def start(self, request: DraftRequest) -> None:
        """See `Drafter`."""
        self.inner.start(request)

    def rebuild(self, request: DraftRequest) -> None:
        """See `Drafter`."""
        self.inner.rebuild(request)

    def prefill(self, max_rows: int) -> int:
        """See `Drafter`."""
        return self.inner.prefill(max_rows)

    def propose(self, budgets: Sequence[DraftBudget]) -> Sequence[Draft]:
        """See `Drafter`."""
        return self.inner.propose(budgets)

    def observe(self, observations: Sequence[Observation]) -> None:
        """See `Drafter`."""
        self.inner.observe(observations)

    def finish(self, request: DraftRequest) -> None:
        """See `Drafter`."""
        self.inner.finish(request)

    def check(self) -> None:
        """See `Drafter`."""
        self.inner.check()
