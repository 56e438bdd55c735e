"""Lookahead decoding: beside every step the target itself guesses on, several tokens ahead of the text.

Method: Fu, Bailis, Stoica, Zhang 2024, "Break the sequential dependency of LLM inference using lookahead
decoding". A request holds a window of guesses, W columns wide and N - 1 levels deep, and a pool of n-grams.

*Geometry.* The guess at level l, column c stands for the token c + l places behind the root, the last committed
token; the root itself is level 0, column 0. The levels are the latest N - 1 Jacobi iterations, the oldest first. A
guess is to see the committed text, the root, and

    at level 0, column c:   the columns 1 … c of level 0
    at level l, column c:   the columns 1 … c of level 0, then the levels 1 … l of column c

which are c + l tokens at the places 1 … c + l: a path. So the window is a tree, evaluated as W · (N - 1) - 1 auxiliary
rows. With row(l, c) = l · W + c (the root is row 0) the parent of row r is r - 1 on level 0 and r - W on the others.
W = 4, N = 3, each guess written as its place:

    level 0     root ─── 1 ─── 2 ─── 3
                 │       │     │     │
    level 1      1       2     3     4

*A step.* The deepest level's logits draw one more token a column, the next iteration. So column c has grown into an
n-gram, from its token of level 0 (the root for column 0) to the new one, and that goes to the pool. The oldest level
goes, the new one comes: level l + 1 becomes level l, column by column, and every guess is one place nearer to the root,
because the text has moved on. Where it has moved on further the window still goes one place, as the authors' does.

*A draft* holds the n-grams of the pool that begin with the root: their other N - 1 tokens, as a tree (the
verification branch), and the window where it has room. A window that is not evaluated stays as it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from core.drafter_settings import LookaheadSettings
from core.records import SamplingParams
from decode.draft import NO_DRAFT, Draft
from decode.drafters.protocol import DraftBudget, DrafterNeeds, DraftRequest, Observation
from decode.drafters.trie import merge_paths
from decode.sampling.draft_noise import DraftDraw, draw_draft

_NGRAM_BYTES = 256
"""An n-gram in the pool, about: its tuple, its place in a list, and its share of the dictionary."""


@dataclass(slots=True, eq=False)
class _State:
    """One request. `window[l · W + c]` is the guess at level l, column c; [0] stands for the root and is not read.

    `pool`: n-grams by first token, the latest first, without that token. `sampling` draws the new guesses.
    """

    window: list[int]
    sampling: SamplingParams
    pool: dict[int, list[tuple[int, ...]]] = field(default_factory=dict)


class LookaheadDrafter:
    """Proposes a tree of n-grams and evaluates its window beside it. Needs no weights, no corpus, no warm-up.

    `max_context`: positions of the target; the window is left out where it would reach beyond.
    """

    name = "lookahead"

    def __init__(self, settings: LookaheadSettings, max_context: int) -> None:
        self._width = settings.window
        self._guesses = settings.guesses
        self._max_context = max_context
        self._farthest = settings.window + settings.ngram - 3
        self._parents = window_parents(settings.window, settings.ngram)
        self._states: dict[int, _State] = {}
        longest = settings.ngram - 1
        self.needs = DrafterNeeds(
            max_draft_length=longest,
            default_draft_length=settings.draft_length or longest,
            bytes_per_token=settings.window * _NGRAM_BYTES,
            max_draft_width=settings.guesses,
            default_draft_width=settings.guesses,
            auxiliary_rows=len(self._parents),
        )

    def start(self, request: DraftRequest) -> None:
        """An empty pool; the window guesses that the text goes on with its own last tokens."""
        sampling = request.sampling
        if request.verification == "rejection":
            sampling = replace(sampling, temperature=0.0)
        last = request.history.token_ids[-self._farthest :]
        window = [
            last[(row % self._width + row // self._width - 1) % len(last)]
            for row in range(1 + len(self._parents))
        ]
        self._states[request.key] = _State(window, sampling)

    def rebuild(self, request: DraftRequest) -> None:
        """As `start`: the pool is learnt anew."""
        self.start(request)

    def prefill(self, max_rows: int) -> int:
        """No rows of its own."""
        return 0

    def propose(self, budgets: Sequence[DraftBudget]) -> Sequence[Draft]:
        """For each budget the n-grams that begin with its last token, and the window; nodes go before the window."""
        return [self._propose_one(budget) for budget in budgets]

    def observe(self, observations: Sequence[Observation]) -> None:
        """Move every window that was evaluated, and take its n-grams in."""
        seen = [
            (observation, logits[-self._width :])
            for observation in observations
            if (logits := observation.auxiliary_logits) is not None and len(logits) == len(self._parents)
        ]
        if seen:
            self._iterate([observation for observation, _ in seen], torch.cat([rows for _, rows in seen]))

    def finish(self, request: DraftRequest) -> None:
        """Drop window and pool."""
        self._states.pop(request.key, None)

    def check(self) -> None:
        """Called when idle: no state may be left."""
        if self._states:
            raise AssertionError(f"lookahead keeps {len(self._states)} windows of finished requests")

    def _propose_one(self, budget: DraftBudget) -> Draft:
        request = budget.request
        state = self._states[request.key]
        token_ids = request.history.token_ids
        depth = min(budget.draft_length, budget.max_nodes)
        if depth < 1:
            return NO_DRAFT
        known = state.pool.get(token_ids[-1], ())
        draft = merge_paths((rest[:depth] for rest in known), request.draft_width, budget.max_nodes)
        fits = draft.num_rows + len(self._parents) <= budget.max_nodes
        if not fits or len(token_ids) - 1 + self._farthest >= self._max_context:
            return draft
        return replace(
            draft,
            auxiliary_token_ids=tuple(state.window[1:]),
            auxiliary_parents=tuple(parent and parent + draft.num_rows for parent in self._parents),
        )

    def _iterate(self, observations: Sequence[Observation], logits: Tensor) -> None:
        """`logits` [observations · W, vocabulary]: the deepest level of each window."""
        draws = [draw for observation in observations for draw in self._draws(observation.request)]
        drawn = draw_draft(draws, logits)
        for index, observation in enumerate(observations):
            tokens = drawn[index * self._width : (index + 1) * self._width]
            new = [token.token_id for token in tokens if token is not None]
            if len(new) == self._width:
                self._advance(observation, new)

    def _draws(self, request: DraftRequest) -> list[DraftDraw]:
        """The new level's draws, at the places that it takes in the moved window.

        The target's own way of drawing: in invariant mode with the noise that it will draw with there itself. Under
        rejection the likeliest token: of all one-hot proposals it is accepted most often.
        """
        state = self._states[request.key]
        kept = state.window[self._width :]
        draws: list[DraftDraw] = []
        for column in range(self._width):
            path = (*kept[1 : column + 1], *kept[self._width + column :: self._width])
            draws.append(
                DraftDraw(
                    sampling=state.sampling,
                    seed=request.seed,
                    choice=request.choice,
                    position=len(request.history.token_ids) + len(path),
                    verification="invariant",
                    history=request.history,
                    path=path,
                )
            )
        return draws

    def _advance(self, observation: Observation, new: Sequence[int]) -> None:
        """One n-gram a column, that of column 0 the latest: its context is the surest. Then the window moves."""
        state = self._states[observation.request.key]
        root = observation.request.history.token_ids[-1 - len(observation.token_ids)]
        for column in reversed(range(self._width)):
            first, *rest = state.window[column :: self._width]
            self._remember(state.pool, first if column else root, (*rest, new[column]))
        state.window = [*state.window[self._width :], *new]

    def _remember(self, pool: dict[int, list[tuple[int, ...]]], first: int, rest: tuple[int, ...]) -> None:
        known = pool.setdefault(first, [])
        if rest in known:
            known.remove(rest)
        known.insert(0, rest)
        del known[self._guesses :]


def window_parents(window: int, ngram: int) -> tuple[int, ...]:
    """Parent rows of the window's rows 1, 2, … where it hangs on the root alone, without nodes before it."""
    return tuple(row - 1 if row < window else row - window for row in range(1, window * (ngram - 1)))
