"""Which drafter `auto` takes: the one that was measured to be fastest for requests of this class.

A request that has ended says how many tokens its steps emitted, x, and how many plain steps these took the time of, y
(`decode/draft_costs.py`). Of a drafter on a class of requests are kept sums over its requests, an older one counting
γ for each request of the class since, so that they follow what changes:

    gain = Σ x / Σ y            its speed over plain decoding
    doubt = sqrt(Σ (x - gain · y)² + D²) / Σ y        standard error of that ratio, D tokens put on top

Every candidate is tried by `TRIALS` requests of a class, in the order given, or fewer where its gain with its doubt is
below another one's gain less its doubt. After that requests take the candidate with the largest gain among those whose
gain less its doubt is above 1, and plain decoding where there is none. One request in `EXPLORED_EVERY` goes to the
candidate of which least is known instead; one in `DOUBTED_EVERY` to the one that may bring most (gain with doubt), if
that is more than what is taken brings, by `WORTH_DOUBTING` at least; where plain decoding is taken, to the one that
brought most, if that is more than 1 by as much. Nothing is drawn at random, and no candidate is given up.

Every drafter of a batch takes its own time in each step, so trials are dear in company: where others run, three trials
in four go to the candidate that most of them use, if they use any, and the rest to the one that is to be tried.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

PLAIN = "none"
TRIALS = 3
EXPLORED_EVERY = 16
DOUBTED_EVERY = 4
WORTH_DOUBTING = 0.02
_KEPT = 0.98
_DOUBT_TOKENS = 12.0


@dataclass(slots=True)
class _Figures:
    """Of one drafter on one class. The sums are those of the class's request number `at`."""

    started: int = 0
    at: int = 0
    tokens: float = 0.0
    steps: float = 0.0
    tokens_squared: float = 0.0
    tokens_steps: float = 0.0
    steps_squared: float = 0.0

    def fade(self, now: int) -> None:
        """Let the sums be those of request `now`."""
        kept = _KEPT ** (now - self.at)
        self.at = now
        self.tokens *= kept
        self.steps *= kept
        self.tokens_squared *= kept
        self.tokens_steps *= kept
        self.steps_squared *= kept

    def add(self, tokens: float, steps: float) -> None:
        """One request."""
        self.tokens += tokens
        self.steps += steps
        self.tokens_squared += tokens * tokens
        self.tokens_steps += tokens * steps
        self.steps_squared += steps * steps

    @property
    def gain(self) -> float:
        """Speed over plain decoding; 1.0 where nothing was measured."""
        return self.tokens / self.steps if self.steps > 0.0 else 1.0

    @property
    def doubt(self) -> float:
        """Of the gain; infinite where nothing was measured."""
        if self.steps <= 0.0:
            return math.inf
        gain = self.gain
        spread = self.tokens_squared - 2.0 * gain * self.tokens_steps + gain * gain * self.steps_squared
        return math.sqrt(max(0.0, spread) + _DOUBT_TOKENS**2) / self.steps

    @property
    def sure_gain(self) -> float:
        """The gain less its doubt."""
        return self.gain - self.doubt

    @property
    def possible_gain(self) -> float:
        """The gain with its doubt."""
        return self.gain + self.doubt


@dataclass(slots=True)
class _ClassFigures:
    """Of one class of requests: how many there were, and what its drafters brought."""

    requests: int = 0
    drafters: dict[str, _Figures] = field(default_factory=dict)


class DrafterChoice:
    """One a worker; one thread. Holds a few numbers for each (class, drafter) that was ever a candidate."""

    def __init__(self) -> None:
        self._classes: dict[str, _ClassFigures] = {}

    def choose(
        self, request_class: str, candidates: Sequence[str], company: Mapping[str, int] | None = None
    ) -> str:
        """The drafter of the next request: one of the candidates, at least one, the likeliest first; or `PLAIN`.

        `company`: live requests by drafter.
        """
        known = self._classes.setdefault(request_class, _ClassFigures())
        known.requests += 1
        figures = self._figures(known, candidates)
        hopeful = _hopeful(figures)
        least_tried = min(hopeful, key=lambda name: figures[name].started)
        if figures[least_tried].started < TRIALS:
            chosen = least_tried
            if known.requests % DOUBTED_EVERY:
                chosen = _most_used(hopeful, company or {}) or least_tried
        else:
            chosen = self._explored(known.requests, figures) or _best(figures)
        if chosen != PLAIN:
            figures[chosen].started += 1
        return chosen

    def best(self, request_class: str, candidates: Sequence[str]) -> str:
        """As `choose` would without a trial; nothing is counted."""
        known = self._classes.get(request_class)
        return candidates[0] if known is None else _best(self._figures(known, candidates))

    def learn(self, request_class: str, drafter: str, tokens: float, plain_steps: float) -> None:
        """What a request brought whose drafter was chosen here. One without steps, or of `PLAIN`, says nothing."""
        known = self._classes.get(request_class)
        if known is None or drafter not in known.drafters or plain_steps <= 0.0:
            return
        figures = known.drafters[drafter]
        figures.fade(known.requests)
        figures.add(tokens, plain_steps)

    @staticmethod
    def _figures(known: _ClassFigures, candidates: Sequence[str]) -> dict[str, _Figures]:
        figures = {name: known.drafters.setdefault(name, _Figures(at=known.requests)) for name in candidates}
        for one in figures.values():
            one.fade(known.requests)
        return figures

    @staticmethod
    def _explored(number: int, figures: dict[str, _Figures]) -> str | None:
        """Who is tried though another one is taken, if request `number` of the class is one of those."""
        taken = _best(figures)
        others = [name for name in figures if name != taken]
        if not others:
            return None
        level = 1.0 if taken == PLAIN else figures[taken].gain
        promise = {
            name: figures[name].gain if taken == PLAIN else figures[name].possible_gain for name in others
        }
        doubted = max(others, key=lambda name: promise[name])
        if number % EXPLORED_EVERY == 0:
            return min(others, key=lambda name: figures[name].steps)
        if number % DOUBTED_EVERY == 0 and promise[doubted] > level * (1.0 + WORTH_DOUBTING):
            return doubted
        return None


def _hopeful(figures: dict[str, _Figures]) -> list[str]:
    """Those that may be the fastest; at least one."""
    surest = max(one.sure_gain for one in figures.values())
    return [name for name, one in figures.items() if one.possible_gain >= surest]


def _most_used(names: Sequence[str], company: Mapping[str, int]) -> str | None:
    """The name that most of the company uses; None where none of them is used."""
    most = max(names, key=lambda name: company.get(name, 0))
    return most if company.get(most, 0) else None


def _best(figures: dict[str, _Figures]) -> str:
    """The fastest of those that are surely faster than plain decoding; before any has ended, the first."""
    if all(one.steps <= 0.0 for one in figures.values()):
        return next(iter(figures))
    sure = [name for name, one in figures.items() if one.sure_gain > 1.0]
    return max(sure, key=lambda name: figures[name].gain) if sure else PLAIN
