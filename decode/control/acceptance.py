"""Decayed acceptance of one choice (or of a class of requests), by depth."""

from collections.abc import Sequence

FIRST_GUESS = 0.6
"""Conditional rate assumed where nothing was seen: hopeful, so that a drafter is tried."""


class AcceptanceStats:
    """Conditional rates: accepted at depth i / offered at depth i, among steps that accepted depth i - 1.

    `decay` is what one more trial leaves of the earlier ones (0.97: about the last 33 trials count). The prior
    counts as `prior_trials` trials; a depth without its own prior takes that of the depth before.
    """

    __slots__ = ("_decay", "_prior", "_prior_trials", "_rates", "_successes", "_trials")

    def __init__(
        self,
        max_depth: int,
        prior: Sequence[float] = (),
        *,
        decay: float = 0.97,
        prior_trials: float = 2.0,
    ) -> None:
        self._decay = decay
        self._prior_trials = prior_trials
        known = list(prior[:max_depth]) or [FIRST_GUESS]
        self._prior = known + [known[-1]] * (max_depth - len(known))
        self._trials = [0.0] * max_depth
        self._successes = [0.0] * max_depth
        self._rates: tuple[float, ...] | None = None

    @property
    def rates(self) -> tuple[float, ...]:
        """The conditional rate at depth 1, 2, …, max_depth; each in (0, 1)."""
        if self._rates is None:
            self._rates = self._estimate()
        return self._rates

    def observe(self, offered_depth: int, accepted: int) -> None:
        """One step whose draft reached `offered_depth` and of which `accepted` tokens were kept."""
        depth_reached = min(offered_depth, accepted + 1, len(self._trials))
        for depth in range(depth_reached):
            self._trials[depth] = self._decay * self._trials[depth] + 1.0
            self._successes[depth] = self._decay * self._successes[depth] + (depth < accepted)
        if depth_reached > 0:
            self._rates = None

    def _estimate(self) -> tuple[float, ...]:
        """Shrunk towards the prior; an unseen depth leans on the depth before it rather than on the prior alone."""
        rates: list[float] = []
        for depth, trials in enumerate(self._trials):
            prior = self._prior[depth]
            if depth and trials < self._prior_trials:
                prior = 0.5 * (prior + rates[-1])
            rate = (self._successes[depth] + self._prior_trials * prior) / (trials + self._prior_trials)
            rates.append(min(0.999, max(0.001, rate)))
        return tuple(rates)
