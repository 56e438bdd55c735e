"""Where one choice stands in its grammar, and what may come next there and behind draft tokens. Engine thread only.

The library's bounds (`core/grammar.py`) are spent by what a matcher has done, so what follows at the answer's end must
not depend on drafts. Hence two matchers. The answer's own takes for every committed token one mask and the token,
whoever drafted it and however many came at once: it meets a bound where plain decoding meets it. Another one goes
behind draft tokens and back; where it breaks, or takes too long, nothing is drafted, which the text does not show.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from core.clock import Clock
from core.errors import InvalidArgument
from core.grammar import FIELD, CompiledGrammar, GrammarMatcher
from core.records import SamplingParams
from decode.sampling.history import TokenHistory
from decode.sampling.pipeline import banned_by_words

Allowed = NDArray[np.bool_]

NOTHING_LEFT = "the grammar leaves no token to draw"

_ALLOWANCE_S: Final = 0.1
_MASK_S: Final = 0.003
"""Masks behind draft tokens may take so long each, beyond an allowance for the first ones, which build states."""


class GrammarState:
    """The `TokenConstraint` of one history. `vocabulary`: width of the target's logits.

    Compiles: made off the engine thread. Raises InvalidArgument where what the history holds of the answer does not
    follow the grammar.
    """

    def __init__(
        self,
        compiled: CompiledGrammar,
        history: TokenHistory,
        sampling: SamplingParams,
        vocabulary: int,
        clock: Clock,
    ) -> None:
        self._history = history
        self._sampling = sampling
        self._vocabulary = vocabulary
        self._num_token_ids = min(compiled.num_token_ids, vocabulary)
        self._matcher: GrammarMatcher = compiled.matcher()
        self._ahead = _Ahead(compiled, clock)
        self._num_committed = 0
        self._here: _Bits | None = None
        self._masks: dict[tuple[int, ...], Tensor | None] = {}
        self._fault = ""
        self._ended = False
        self._catch_up()
        if self._fault:
            raise InvalidArgument(FIELD, f"the tokens to go on from do not follow it: {self._fault}")
        self.mask(())

    @property
    def fault(self) -> str:
        """See `TokenConstraint`."""
        return f"the grammar cannot be followed: {self._fault}" if self._fault else NOTHING_LEFT

    def mask(self, path: Sequence[int]) -> Tensor | None:
        """See `TokenConstraint`."""
        self._catch_up()
        key = tuple(path)
        if key not in self._masks:
            allowed = self._allowed(key)
            self._masks[key] = None if allowed is None else torch.from_numpy(allowed)
        return self._masks[key]

    def _catch_up(self) -> None:
        """Take in what was committed since."""
        history = self._history
        if history.num_output == self._num_committed:
            return
        self._masks.clear()
        fresh = history.token_ids[len(history.prompt_ids) + self._num_committed :]
        for token_id in fresh:
            self._commit(token_id)
        if not self._ended:
            self._ahead.commit(fresh)

    def _commit(self, token_id: int) -> None:
        """One mask and one token, as plain decoding does it."""
        self._num_committed += 1
        self._ended = self._ended or token_id in self._sampling.eos_token_ids
        if self._ended or self._fault:
            return
        self._bits_here()
        self._here = None
        if not self._fault and not self._matcher.consume([token_id]):
            self._fault = self._matcher.error or "a token that it does not allow"

    def _bits_here(self) -> "_Bits | None":
        """At the answer's end; None where a bound was met."""
        if self._here is None and not self._fault:
            self._here = _bits_of(self._matcher)
            self._fault = self._matcher.error
        return None if self._fault else self._here

    def _allowed(self, path: tuple[int, ...]) -> Allowed | None:
        ends = self._sampling.eos_token_ids
        if path:
            before = self.mask(path[:-1])
            if before is None or not before[path[-1]]:
                return None
        if self._fault:
            return self._only(())
        if self._ended or any(token_id in ends for token_id in path):
            return self._only(ends)
        bits = self._ahead.bits(path) if path else self._bits_here()
        if bits is None:
            return None if path else self._only(())
        packed, may_end = bits
        allowed = self._only(())
        allowed[: self._num_token_ids] = np.unpackbits(packed, bitorder="little")[: self._num_token_ids]
        allowed[list(ends)] = may_end
        self._heed_min_tokens(allowed, path)
        return allowed

    def _heed_min_tokens(self, allowed: Allowed, path: tuple[int, ...]) -> None:
        """No end before its time, in place, unless nothing else is left."""
        sampling = self._sampling
        if self._num_committed + len(path) >= sampling.min_tokens:
            return
        kept = allowed.copy()
        kept[[*sampling.eos_token_ids, *sampling.stop_token_ids]] = False
        left = kept.copy()
        left[banned_by_words(sampling, [*self._history.token_ids, *path])] = False
        if left.any():
            allowed[:] = kept

    def _only(self, token_ids: Sequence[int]) -> Allowed:
        allowed = np.zeros(self._vocabulary, np.bool_)
        allowed[list(token_ids)] = True
        return allowed


_Bits = tuple[NDArray[np.uint8], bool]
"""A mask, bit i of byte j for token 8 j + i, and whether the answer may end."""


class _Ahead:
    """The matcher behind draft tokens: moved by consuming and rolling back. It may give up at any time."""

    def __init__(self, compiled: CompiledGrammar, clock: Clock) -> None:
        self._compiled = compiled
        self._clock = clock
        self._matcher: GrammarMatcher | None = compiled.draft_matcher()
        self._path: list[int] = []
        self._left_s = _ALLOWANCE_S

    def commit(self, token_ids: Sequence[int]) -> None:
        """The answer grew by `token_ids`."""
        if self._go(token_ids):
            self._path.clear()
        else:
            self._matcher = None

    def bits(self, path: Sequence[int]) -> "_Bits | None":
        """Behind `path`; None: not to be had any more."""
        began_s = self._clock.now_s()
        found = _bits_of(self._matcher) if self._go(path) and self._matcher is not None else None
        if self._matcher is None:
            return None
        if found is None or self._matcher.error:
            self._compiled.wear_out()
            self._matcher = None
            return None
        self._left_s += _MASK_S - (self._clock.now_s() - began_s)
        self._left_s = min(self._left_s, _ALLOWANCE_S)
        if self._left_s < 0:
            self._matcher = None
        return found

    def _go(self, path: Sequence[int]) -> bool:
        """Stand behind `path`; False: the matcher does not get there."""
        if self._matcher is None:
            return False
        shared = 0
        for standing, wanted in zip(self._path, path, strict=False):
            if standing != wanted:
                break
            shared += 1
        self._matcher.rollback(len(self._path) - shared)
        del self._path[shared:]
        taken = self._matcher.consume(path[shared:])
        self._path.extend(path[shared : shared + taken])
        return len(self._path) == len(path)


def _bits_of(matcher: GrammarMatcher) -> _Bits:
    packed = np.frombuffer(matcher.bitmask(), np.uint8)
    return packed, matcher.may_end
