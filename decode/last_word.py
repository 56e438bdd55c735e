"""Verification on the last stage of a pipelined target: what to draw, and what was drawn, as whole numbers.

Both stages speak words of 64 bits, never objects. A question is

    number, vocabulary, items, pool, values, results   sizes and the count of questions so far
    key, builds on, accepted, last token               of each item: whose it is, and the guess that it rests on
    the items, pool and values of `PackedItems`

and its answer

    number, items, results
    key, tokens, accepted rows, error                  of each item, as of `native.walk_of`; `VOID`: not drawn
    tokens drawn [results], rows accepted [results]

An item that *builds on* place p of the question before it was guessed: it holds where that item's draft was accepted
whole, `accepted` tokens of it, and its bonus token is `last token`. Else it is void, and nobody wants its verdict.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from decode.draft import Verdict
from decode.sampling import native, sampler
from decode.sampling.arithmetic import Int64
from decode.sampling.native import walk_of, walk_packed
from decode.sampling.step_items import ITEM_DTYPE, PackedItems
from engine.pipeline_messages import PipelineBroken

VOID: Final = -1
_HEADER_WORDS: Final = 6
_LINK_WORDS: Final = 4
_ANSWER_HEADER_WORDS: Final = 3
_ITEM_WORDS: Final = ITEM_DTYPE.itemsize // 8
_BUILDS_ON_NOTHING: Final = -1


@dataclass(frozen=True, slots=True)
class Link:
    """Whose item it is, and what it builds on: None, or the item at place `builds_on` of the question before."""

    key: int
    builds_on: int | None = None
    num_accepted: int = 0
    last_token_id: int = 0

    def words(self) -> tuple[int, int, int, int]:
        """As it is sent."""
        builds_on = _BUILDS_ON_NOTHING if self.builds_on is None else self.builds_on
        return self.key, builds_on, self.num_accepted, self.last_token_id


@dataclass(frozen=True, slots=True)
class Question:
    """What the last stage is to draw. `number` counts questions; `vocab_size`: ids from there on cannot be drawn.

    links: Int64  # [items, 4], `Link.words` of each item
    """

    number: int
    vocab_size: int
    packed: PackedItems
    links: Int64

    @classmethod
    def of(cls, number: int, vocab_size: int, packed: PackedItems, links: Sequence[Link]) -> "Question":
        """One link for each item of `packed`."""
        words = [link.words() for link in links]
        return cls(number, vocab_size, packed, np.array(words, np.int64).reshape(len(words), _LINK_WORDS))

    def to_tensor(self) -> Tensor:
        """Tensor  # [bytes] uint8, for `StepMessage.verify`."""
        packed = self.packed
        sizes = (len(packed.items), len(packed.pool), len(packed.values), packed.num_results)
        words = [
            np.array((self.number, self.vocab_size, *sizes), np.int64),
            self.links.reshape(-1),
            packed.items.view(np.int64),
            packed.pool,
            packed.values.view(np.int64),
        ]
        return torch.from_numpy(np.concatenate(words)).view(torch.uint8)

    @classmethod
    def from_tensor(cls, verify: Tensor) -> "Question":
        """Its inverse. Raises PipelineBroken where sizes and length differ."""
        if len(verify) % 8 or len(verify) < 8 * _HEADER_WORDS:
            raise PipelineBroken(f"a question of {len(verify)} bytes")
        words: Int64 = verify.view(torch.int64).numpy()
        number, vocab_size, num_items, num_pool, num_values, num_results = words[:_HEADER_WORDS].tolist()
        lengths = (num_items * _LINK_WORDS, num_items * _ITEM_WORDS, num_pool, num_values)
        ends = np.cumsum((_HEADER_WORDS, *lengths)).tolist()
        if min(lengths) < 0 or ends[-1] != len(words):
            raise PipelineBroken(f"a question of {len(words)} words whose sizes are {lengths}")
        links, items, pool, values = (words[start:end] for start, end in pairwise(ends))
        packed = PackedItems(items.view(ITEM_DTYPE), pool, values.view(np.float64), num_results)
        return cls(number, vocab_size, packed, links.reshape(num_items, _LINK_WORDS))

    def verdicts(self, answer: Tensor) -> list[Verdict | None] | None:
        """One for each item, None where it was void; None for all of them: the step was not computed.

        answer: Tensor  # [words] int64. Raises PipelineBroken where it answers something else.
        """
        if not len(answer):
            return None
        num_items, num_results = len(self.links), self.packed.num_results
        words = answer.numpy()
        if words[:_ANSWER_HEADER_WORDS].tolist() != [self.number, num_items, num_results]:
            raise PipelineBroken(f"question {self.number} was asked, {words[0]} answered")
        rows_at = _ANSWER_HEADER_WORDS + num_items * 4
        outcomes = words[_ANSWER_HEADER_WORDS:rows_at].reshape(num_items, 4)
        if outcomes[:, 0].tolist() != self.links[:, 0].tolist():
            raise PipelineBroken(f"question {self.number} was answered for other requests")
        drawn = words[rows_at:].reshape(2, num_results).tolist()
        starts = self.packed.items["result"].tolist()
        return [
            None if outcome[-1] == VOID else _verdict(drawn, start, outcome)
            for start, (_, *outcome) in zip(starts, outcomes.tolist(), strict=True)
        ]


def _verdict(drawn: Sequence[Sequence[int]], start: int, outcome: Sequence[int]) -> Verdict:
    walk = walk_of(drawn, start, outcome)
    return Verdict(walk.accepted_rows, walk.token_ids, (), walk.error)


class NativeLastWord:
    """Draws with the native kernel; see `engine.pipeline.LastWord`. Belongs to the thread of the last stage.

    Keeps what became of the last question's items, by which those of the next one hold or are void.
    """

    def __init__(self) -> None:
        self._library = native.kernels()
        self._number = 0
        self._last: list[tuple[int, int] | None] = []
        """Of each item (tokens accepted, last token), None where it was void or ended in an error."""

    def is_void(self, verify: Tensor) -> bool:
        """Whether every item of the question is void. Then this was all that is asked about it."""
        question = Question.from_tensor(verify)
        if self._held(question).any():
            return False
        self._number, self._last = question.number, [None] * len(question.links)
        return True

    def verdicts(self, verify: Tensor, logits: Tensor) -> Tensor:
        """See the module: Tensor  # [words] int64. `logits` [rows, width] float32: their padding is masked.

        Raises PipelineBroken where the kernel could not be built here: whoever asks has one, and would have drawn.
        """
        if self._library is None:
            raise PipelineBroken("the last stage has no sampling kernel")
        question = Question.from_tensor(verify)
        held = self._held(question)
        packed = question.packed
        if logits.shape[1] > question.vocab_size:
            with torch.inference_mode():
                logits[:, question.vocab_size :] = -torch.inf
        wanted = PackedItems(packed.items[held], packed.pool, packed.values, packed.num_results)
        drawn, found = walk_packed(self._library, wanted, sampler.as_rows(logits))
        outcomes = np.zeros((len(held), 4), np.int64)
        outcomes[:, 0] = question.links[:, 0]
        outcomes[:, 3] = VOID
        outcomes[held, 1:] = found
        starts = packed.items["result"].tolist()
        self._number = question.number
        self._last = [
            None if error else (num_accepted, int(drawn[0, start + num_drawn - 1]))
            for start, (_, num_drawn, num_accepted, error) in zip(starts, outcomes.tolist(), strict=True)
        ]
        header = np.array((question.number, len(held), packed.num_results), np.int64)
        return torch.from_numpy(np.concatenate([header, outcomes.reshape(-1), drawn.reshape(-1)]))

    def _held(self, question: Question) -> NDArray[np.bool_]:
        """[items]: which are not void. Raises PipelineBroken where one builds on a question that was not the last."""
        held = np.ones(len(question.links), np.bool_)
        for place, (_, builds_on, num_accepted, last_token_id) in enumerate(question.links.tolist()):
            if builds_on == _BUILDS_ON_NOTHING:
                continue
            if question.number != self._number + 1 or not 0 <= builds_on < len(self._last):
                raise PipelineBroken(f"question {question.number} builds on one before {self._number}")
            held[place] = self._last[builds_on] == (num_accepted, last_token_id)
        return held
