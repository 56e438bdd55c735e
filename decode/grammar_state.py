"""Where one choice stands in its grammar, and what may come next there and behind draft tokens. Engine thread only.

The matcher stands behind the committed answer, or a few draft tokens further: it is moved by consuming tokens and
rolling them back, and each mask is computed once. A mask depends on the grammar and the tokens before it alone, never
on how the matcher got there, so the text is that of plain decoding under the same grammar.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from core.errors import InvalidArgument
from core.grammar import FIELD, CompiledGrammar, GrammarMatcher
from core.records import SamplingParams
from decode.sampling.history import TokenHistory
from decode.sampling.pipeline import banned_by_words

Allowed = NDArray[np.bool_]

NOTHING_LEFT = "the grammar leaves no token to draw"


class GrammarState:
    """The `TokenConstraint` of one history. `vocabulary`: width of the target's logits.

    Raises InvalidArgument where what the history holds of the answer does not follow the grammar.
    """

    def __init__(
        self, compiled: CompiledGrammar, history: TokenHistory, sampling: SamplingParams, vocabulary: int
    ) -> None:
        self._compiled = compiled
        self._history = history
        self._sampling = sampling
        self._vocabulary = vocabulary
        self._matcher: GrammarMatcher = compiled.matcher()
        self._num_committed = 0
        self._path: list[int] = []
        self._masks: dict[tuple[int, ...], Tensor | None] = {}
        self._fault = ""
        self._ended = False
        if not self._catch_up():
            raise InvalidArgument(FIELD, "the tokens to go on from do not follow it")

    @property
    def fault(self) -> str:
        """See `TokenConstraint`."""
        return f"the grammar cannot be followed: {self._fault}" if self._fault else NOTHING_LEFT

    def mask(self, path: Sequence[int]) -> Tensor | None:
        """See `TokenConstraint`."""
        caught_up = self._catch_up()
        assert caught_up, "the answer has left its grammar"
        key = tuple(path)
        if key not in self._masks:
            allowed = self._allowed(key)
            self._masks[key] = None if allowed is None else torch.from_numpy(allowed)
        return self._masks[key]

    def _catch_up(self) -> bool:
        """Take in what was committed since; whether it follows the grammar."""
        history = self._history
        if history.num_output == self._num_committed:
            return True
        fresh = history.token_ids[len(history.prompt_ids) + self._num_committed :]
        self._num_committed = history.num_output
        self._masks.clear()
        ends = self._sampling.eos_token_ids
        if any(token_id in ends for token_id in fresh):
            self._ended = True
            return True
        follows = self._go(fresh)
        self._path.clear()
        return follows

    def _go(self, path: Sequence[int]) -> bool:
        """Move the matcher behind the draft tokens `path`; False: it does not get there."""
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

    def _allowed(self, path: tuple[int, ...]) -> Allowed | None:
        ends = self._sampling.eos_token_ids
        if path:
            before = self.mask(path[:-1])
            if before is None or not before[path[-1]]:
                return None
        if self._ended or any(token_id in ends for token_id in path):
            return self._only(ends)
        if not self._go(path):
            self._recover(path)
            return None
        bits = np.frombuffer(self._matcher.bitmask(), np.uint8)
        may_end = self._matcher.may_end
        if self._matcher.error:
            self._recover(path)
            return None if path else self._only(())
        allowed = self._only(())
        num_token_ids = min(self._compiled.num_token_ids, self._vocabulary)
        allowed[:num_token_ids] = np.unpackbits(bits, bitorder="little")[:num_token_ids]
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

    def _recover(self, path: tuple[int, ...]) -> None:
        """A matcher that broke behind draft tokens says nothing about the answer: begin anew, as far as it is."""
        if not self._matcher.error:
            return
        if not path:
            self._fault = self._matcher.error
            return
        self._matcher = self._compiled.matcher()
        self._path.clear()
        self._matcher.consume(self._history.output_ids)
