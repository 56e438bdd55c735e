"""Where an answer ends, and what text its tokens make.

The first event in token order wins: stop id or end-of-sequence, stop string, then length. The tokens of
the answer include the one that ended it; the text leaves out a stop id and everything from a stop
string on. What is released after given ids depends on the ids alone, never on how they were grouped into
bursts, so that a resumed request goes on exactly where it was cut.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from core.records import ChoiceFinish, FinishReason, SamplingParams


class Detokenizer(Protocol):
    """Ids to text, one after another; incomplete UTF-8 is held back (`core/tokenizer.py`)."""

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that became certain."""
        ...

    def flush(self) -> str:
        """What was held back, at the end."""
        ...

    def fork(self) -> Self:
        """A second one that stands where this one does."""
        ...


@dataclass(frozen=True, slots=True)
class Cut:
    """What is kept of a burst: `num_tokens` tokens, of which the first `num_text_tokens` make text.

    `text` is None where the text is left to `Finisher.text_of` (on another thread).
    """

    num_tokens: int
    num_text_tokens: int
    finish: FinishReason | None
    text: str | None = None
    stop_string: str = ""

    def finish_of(self, index: int) -> ChoiceFinish | None:
        """How choice `index` ended, if it did."""
        return None if self.finish is None else ChoiceFinish(index, self.finish, self.stop_string)


class Finisher:
    """One choice's ends. `token_limit`: tokens that the answer may have (max_tokens, context, pool).

    Under a grammar an end-of-sequence before min_tokens ends the answer too: it was drawn because nothing else fits.
    Without stop strings no text is needed to find the end; then `push` leaves the text alone and the
    caller gets it from `text_of`, in the order of the cuts.
    """

    def __init__(self, sampling: SamplingParams, token_limit: int, detokenizer: Detokenizer) -> None:
        self._min_tokens = sampling.min_tokens
        self._token_limit = token_limit
        stop_ids = set(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            stop_ids.update(sampling.eos_token_ids)
        self._stop_ids = frozenset(stop_ids)
        self._last_ids = frozenset(sampling.eos_token_ids if sampling.grammar is not None else ())
        self._scanner = StopScanner(sampling.stop)
        self._has_stop_strings = bool(sampling.stop)
        self._detokenizer = detokenizer
        self.num_tokens = 0

    @property
    def tokens_left(self) -> int:
        """Tokens that the answer may still get."""
        return self._token_limit - self.num_tokens

    def fork(self) -> Self:
        """A second one that stands where this one does. Its text, where that is left open, is not to be asked for."""
        copied = copy.copy(self)
        if self._has_stop_strings:
            copied._scanner = copy.copy(self._scanner)
            copied._detokenizer = self._detokenizer.fork()
        return copied

    def push(self, token_ids: Sequence[int]) -> Cut:
        """Take a burst in. Not called again once a cut has a finish."""
        if self._has_stop_strings:
            return self._push_with_text(token_ids)
        for position, token_id in enumerate(token_ids):
            finish = self._next(token_id)
            if finish is not None:
                text_tokens = position if finish is FinishReason.STOP else position + 1
                return Cut(position + 1, text_tokens, finish)
        return Cut(len(token_ids), len(token_ids), None)

    def text_of(self, token_ids: Sequence[int], finished: bool) -> str:
        """The text of a cut that left it open; `token_ids` are its text tokens."""
        text = self._detokenizer.push(token_ids)
        return text + self._detokenizer.flush() if finished else text

    def _next(self, token_id: int) -> FinishReason | None:
        """Counts a token; the event that it is."""
        self.num_tokens += 1
        if token_id in self._stop_ids and (self.num_tokens > self._min_tokens or token_id in self._last_ids):
            return FinishReason.STOP
        return FinishReason.LENGTH if self.num_tokens >= self._token_limit else None

    def _push_with_text(self, token_ids: Sequence[int]) -> Cut:
        released: list[str] = []
        for position, token_id in enumerate(token_ids):
            finish = self._next(token_id)
            stopped_by_id = finish is FinishReason.STOP
            piece = "" if stopped_by_id else self._detokenizer.push((token_id,))
            if finish is not None:
                piece += self._detokenizer.flush()
            text, stop_string = self._scanner.push(piece, self.num_tokens >= self._min_tokens)
            released.append(text)
            text_tokens = position if stopped_by_id else position + 1
            if stop_string:
                return Cut(position + 1, text_tokens, FinishReason.STOP, "".join(released), stop_string)
            if finish is not None:
                released.append(self._scanner.flush())
                return Cut(position + 1, text_tokens, finish, "".join(released))
        return Cut(len(token_ids), len(token_ids), None, "".join(released))


class StopScanner:
    """Finds stop strings in text that comes in pieces, and holds back what may become one."""

    def __init__(self, stop_strings: Sequence[str]) -> None:
        self._stop_strings = tuple(stop_strings)
        self._longest = max((len(stop) for stop in stop_strings), default=0)
        self._held = ""

    def push(self, piece: str, may_stop: bool) -> tuple[str, str]:
        """The text released, and the stop string that was completed ("" if none).

        Of several the one that ends first counts, and of those that end together the longest: what a reader of
        single characters would see, however the text was cut into pieces.
        """
        text = self._held + piece
        found = self._first_match(text) if may_stop else None
        if found is not None:
            start, stop_string = found
            self._held = ""
            return text[:start], stop_string
        held_from = self._held_from(text)
        self._held = text[held_from:]
        return text[:held_from], ""

    def flush(self) -> str:
        """What is held, once."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str] | None:
        best: tuple[int, int] | None = None
        for stop in self._stop_strings:
            start = text.find(stop)
            if start >= 0 and (best is None or (start + len(stop), start) < best):
                best = (start + len(stop), start)
        return None if best is None else (best[1], text[best[1] : best[0]])

    def _held_from(self, text: str) -> int:
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            tail = text[start:]
            if any(len(stop) > len(tail) and stop.startswith(tail) for stop in self._stop_strings):
                return start
        return len(text)
