"""Decayed acceptance of one choice (or of a class of requests): by depth, and whether there was a draft at all."""

from collections.abc import Sequence

FIRST_GUESS = 0.6
"""Conditional rate assumed where nothing was seen: hopeful, so that a drafter is tried."""


class AcceptanceStats:
    """Conditional rates: accepted at depth i / asked for at depth i, among steps that accepted depth i - 1.

    A draft that ended before the depth asked for offered nothing there, and counts as refused: what the controller is
    to know is what asking for one more depth brings. For drafts that reach it these are the rates of what was offered.
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

    def observe(self, asked_depth: int, accepted: int) -> None:
        """One step whose draft was asked for to `asked_depth` and of which `accepted` tokens were kept."""
        for depth in range(min(asked_depth, len(self._trials))):
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


class OfferedShare:
    """The share of drafts asked for that had any node; `prior` stands for the first `prior_trials` of them."""

    __slots__ = ("_decay", "_offered", "_trials")

    def __init__(self, prior: float = 1.0, *, decay: float = 0.97, prior_trials: float = 4.0) -> None:
        self._decay = decay
        self._trials = prior_trials
        self._offered = prior_trials * prior

    @property
    def value(self) -> float:
        """In [0, 1]."""
        return self._offered / self._trials

    def observe(self, *, offered: bool) -> None:
        """One draft that was asked for."""
        self._trials = self._decay * self._trials + 1.0
        self._offered = self._decay * self._offered + offered
