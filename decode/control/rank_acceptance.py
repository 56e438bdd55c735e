"""How often the k-th child of a draft node is the target's token, given that its earlier siblings were not."""

from collections.abc import Sequence

from decode.control.tree_plan import USUAL_RANK_RATES


class RankAcceptance:
    """Conditional rates by rank, as decayed means. Engine thread only.

    `decay` is what one more trial of a rank leaves of that rank's earlier ones. `prior` stands for the first
    `prior_trials` trials and fades like any other; ranks without a prior of their own take the last one's.
    """

    __slots__ = ("_decay", "_successes", "_trials")

    def __init__(
        self,
        max_width: int,
        *,
        decay: float,
        prior: Sequence[float] = USUAL_RANK_RATES,
        prior_trials: float = 8.0,
    ) -> None:
        known = [*prior[:max_width], *[prior[-1]] * (max_width - len(prior))]
        self._decay = decay
        self._trials = [prior_trials] * max_width
        self._successes = [prior_trials * rate for rate in known]

    @property
    def rates(self) -> tuple[float, ...]:
        """Of rank 0, 1, …; each in (0, 1)."""
        return tuple(
            min(0.999, max(0.001, successes / trials))
            for successes, trials in zip(self._successes, self._trials, strict=True)
        )

    def observe(self, parents: Sequence[int], accepted_rows: Sequence[int]) -> None:
        """One verified draft: `parents` as in `Draft`, siblings in the order tried."""
        for offered, taken in rank_trials(parents, accepted_rows):
            last = offered - 1 if taken is None else taken
            for rank in range(min(last + 1, len(self._trials))):
                self._trials[rank] = self._decay * self._trials[rank] + 1.0
                self._successes[rank] = self._decay * self._successes[rank] + (rank == taken)


def rank_trials(parents: Sequence[int], accepted_rows: Sequence[int]) -> list[tuple[int, int | None]]:
    """(children offered, rank of the one that was right or None) at each node of the walk that had children."""
    children: dict[int, list[int]] = {}
    for row, parent in enumerate(parents, start=1):
        children.setdefault(parent, []).append(row)
    trials: list[tuple[int, int | None]] = []
    for node, taken in zip((0, *accepted_rows), (*accepted_rows, None), strict=True):
        offered = children.get(node)
        if offered:
            trials.append((len(offered), None if taken is None else offered.index(taken)))
    return trials
