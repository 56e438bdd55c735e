"""Decayed acceptance of one choice (or of a class of requests), by depth."""

from collections.abc import Sequence

FIRST_GUESS = 0.6
"""Conditional rate assumed where nothing was seen: hopeful, so that a drafter is tried."""


class AcceptanceStats:
    """Conditional rates: accepted at depth i / offered at depth i, among steps that accepted depth i - 1.

    `decay` is what one more trial leaves of the earlier ones (0.97: about the last 33 trials count). The prior
    stands for the first `prior_trials` trials and fades like any other; a depth without its own prior takes that
    of the depth before. Where drafts no longer reach a depth its evidence fades, and the rate of the depth
    before it takes its place.
    """

    __slots__ = ("_decay", "_prior_trials", "_rates", "_successes", "_trials")

    def __init__(
        self,
        max_depth: int,
        prior: Sequence[float] = (),
        *,
        decay: float = 0.97,
        prior_trials: float = 2.0,
    ) -> None:
        known = list(prior[:max_depth]) or [FIRST_GUESS]
        known += [known[-1]] * (max_depth - len(known))
        self._decay = decay
        self._prior_trials = prior_trials
        self._trials = [prior_trials] * max_depth
        self._successes = [prior_trials * rate for rate in known[:max_depth]]
        self._rates: tuple[float, ...] | None = None

    @property
    def rates(self) -> tuple[float, ...]:
        """The conditional rate at depth 1, 2, …, max_depth; each in (0, 1)."""
        if self._rates is None:
            self._rates = self._estimate()
        return self._rates

    def observe(self, offered_depth: int, accepted: int) -> None:
        """One step whose draft reached `offered_depth` and of which `accepted` tokens were kept."""
        for depth in range(min(offered_depth, len(self._trials))):
            reached = depth <= accepted
            self._trials[depth] = self._decay * self._trials[depth] + reached
            self._successes[depth] = self._decay * self._successes[depth] + (depth < accepted)
            self._rates = None

    def _estimate(self) -> tuple[float, ...]:
        rates: list[float] = []
        for trials, successes in zip(self._trials, self._successes, strict=True):
            missing = max(0.0, self._prior_trials - trials) if rates else 0.0
            before = rates[-1] if rates else 0.0
            rate = (successes + missing * before) / (trials + missing)
            rates.append(min(0.999, max(0.001, rate)))
        return tuple(rates)
