"""What drafting costs each choice of a step, counted in steps of plain decoding.

Let a step of B roots take T(R) seconds by the table of measured times, T(R - D) without the D rows of its drafts.
A plain step costs each choice its part, T(R - D) / B. A choice that drafted d of the rows, and whose drafter worked
u seconds for it, cost (T(R) - T(R - D)) · d / D + u besides. Over an answer

    plain steps = Σ 1 + ((T(R) - T(R - D)) · d / D + u) / (T(R - D) / B)

and (tokens that its steps emitted) / (plain steps) is its speed over plain decoding: for B = 1 tokens a second over
those of plain decoding; in a batch what it brought against what it took from all. Rows that cost nothing count as
nothing, rows of a full batch as what they are.
"""

from collections.abc import Callable, Sequence

from decode.choice import Choice


class DraftCosts:
    """One a worker. Engine thread only. `step_seconds(rows)`: measured seconds of a step, 0.0 where nothing was."""

    def __init__(self, step_seconds: Callable[[int], float]) -> None:
        self._step_seconds = step_seconds
        self._spent_s: dict[int, float] = {}

    def spend(self, choices: Sequence[Choice], seconds: float) -> None:
        """A drafter worked so long for these: since each one's last step, in equal parts."""
        for choice in choices:
            self._spent_s[choice.key] = self._spent_s.get(choice.key, 0.0) + seconds / len(choices)

    def charge(self, stepped: Sequence[tuple[Choice, int]], rows: int, prefill_rows: int) -> None:
        """Count a step of `rows` rows: the choices with the rows of their drafts, drafting or not."""
        drafted = sum(own_rows for _, own_rows in stepped)
        plain_s = self._step_seconds(rows - drafted)
        row_s = (self._step_seconds(rows) - plain_s) / drafted if drafted else 0.0
        share_s = plain_s / max(1, rows - drafted - prefill_rows)
        for choice, own_rows in stepped:
            more_s = own_rows * row_s + self._spent_s.pop(choice.key, 0.0)
            choice.request.tally.add_cost(1.0 + (more_s / share_s if share_s > 0.0 else 0.0))

    def forget(self, choice: Choice) -> None:
        """It drafts no more. Idempotent."""
        self._spent_s.pop(choice.key, None)

    def check(self) -> None:
        """Called when idle: no choice may be left."""
        assert not self._spent_s, f"costs are kept of finished choices: {sorted(self._spent_s)}"
