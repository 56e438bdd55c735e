"""Beam search: which hypotheses go on, which have ended, and when it is over. Bookkeeping only: no model, no KV.

score = Σ log-prob / length ^ length_penalty. A log-prob is the target's log-softmax after the pipeline of DESIGN §5
up to the grammar mask, past the hypothesis' own tokens; the length counts tokens, the one that ends it included.

A step ranks all continuations of the running hypotheses by their Σ log-prob, ties to the lower beam, then the lower
token id. The first `beam_width` that do not end run on, in that order. One that ends is kept if it is among the first
`beam_width` of the ranking and its score among the `beam_width` best of all that have ended, ties to the earlier one.

Over: nothing runs on; or `beam_width` hypotheses have ended and, by `early_stopping`,
  True     that is enough;
  False    the best running one, scored at its length of now, does not beat the worst of them;
  "never"  as False, scored at the length that suits it best: the longest possible for length_penalty > 0.
These are the three of Hugging Face transformers' `generate` (5.x), whose choices and answers these are; the scores are
double here, single there. There a processor's changes to log-probs are not normalised again; here they are.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from core.records import SamplingParams, TokenLogprobs
from decode.finisher import Finisher


@dataclass(frozen=True, slots=True)
class Candidate:
    """Running hypothesis number `beam` and one token more. `log_prob`: of all its tokens."""

    beam: int
    token_id: int
    log_prob: float


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A beginning of an answer, or (`ended`) a whole one. `beam`: the number of the hypothesis that it prolongs.

    `logprobs` are those of its tokens, where asked for. `finisher` stands behind its last token.
    """

    token_ids: tuple[int, ...]
    log_prob: float
    beam: int
    ended: bool
    finisher: Finisher
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """An ended hypothesis and its score."""

    score: float
    hypothesis: Hypothesis


class BeamSearch:
    """One search. `finisher` stands before the first token of an answer, and is left as it is."""

    def __init__(self, sampling: SamplingParams, finisher: Finisher) -> None:
        self._width = sampling.beam_width
        self._length_penalty = sampling.length_penalty
        self._early_stopping = sampling.early_stopping
        self._longest = finisher.tokens_left
        self.running: list[Hypothesis] = [Hypothesis((), 0.0, 0, False, finisher)]
        self.finished: list[Finished] = []
        """The best first."""
        self.length = 0
        """Tokens of each running hypothesis."""
        self.over = False

    def advance(self, candidates: Iterable[Candidate], extend: Callable[[Candidate], Hypothesis]) -> None:
        """One token further. Of each running hypothesis the likeliest tokens must be among `candidates`.

        Enough are `beam_width` tokens that do not end it and all that are likelier. `extend` is called for
        those that the ranking comes to.
        """
        self.length += 1
        running: list[Hypothesis] = []
        ranking = sorted(candidates, key=lambda one: (-one.log_prob, one.beam, one.token_id))
        for rank, candidate in enumerate(ranking):
            if rank >= self._width and len(running) == self._width:
                break
            hypothesis = extend(candidate)
            if hypothesis.ended and rank < self._width:
                self.finished.append(Finished(self._score(hypothesis.log_prob, self.length), hypothesis))
            elif not hypothesis.ended and len(running) < self._width:
                running.append(hypothesis)
        self.finished.sort(key=lambda entry: -entry.score)
        del self.finished[self._width :]
        self.running = running
        self.over = self._is_over()

    def _is_over(self) -> bool:
        if not self.running:
            return True
        if len(self.finished) < self._width:
            return False
        if self._early_stopping is True:
            return True
        grows = self._early_stopping == "never" and self._length_penalty > 0.0
        best = self._score(self.running[0].log_prob, self._longest if grows else self.length)
        return best <= self.finished[-1].score

    def _score(self, log_prob: float, length: int) -> float:
        return log_prob / math.pow(length, self._length_penalty)
