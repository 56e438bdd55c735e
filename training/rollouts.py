"""Rollouts: the target writes a user turn, then answers it; what drafts are trained on is what the target says itself.

Each rollout draws from noise of its own (recipe seed, number), and the engine's rows do not depend on their
neighbours: so a number gives the same rollout in any batch, and a run that was killed goes on where it was.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from core.tokenizer import Tokenizer
from engine.block_table import BlockTable
from engine.engine import Engine
from engine.step_batch import SequenceStep
from outrider.v1 import common_pb2
from training.rollout_store import Recipe, Rollout
from training.seeds import opening

TOP_K: Final = 64
TOP_P: Final = 0.95
USER_TEMPERATURE: Final = 1.0
PROMPT_ROWS: Final = 64
"""Rows of a prompt computed in one step at most, so that the others go on."""
_SENTINEL: Final = "\u2402user turn\u2403"


@dataclass(frozen=True, slots=True)
class ChatFrame:
    """The template around a user turn, as ids. A turn ends with one of `end_ids`; `tail` begins with one of them."""

    head: tuple[int, ...]
    tail: tuple[int, ...]
    end_ids: frozenset[int]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "ChatFrame":
        """Raises InvalidArgument where the model has no chat template."""
        message = common_pb2.ChatMessage(role="user", content=_SENTINEL)
        head, _, tail = tokenizer.apply_chat_template([message]).partition(_SENTINEL)
        tail_ids = tuple(tokenizer.encode(tail))
        return cls(
            tuple(tokenizer.encode(head)), tail_ids, frozenset((*tokenizer.eos_token_ids, *tail_ids[:1]))
        )


@dataclass(slots=True, eq=False)
class _Slot:
    number: int
    class_name: str
    temperature: float
    noise: np.random.Generator
    token_ids: list[int]
    user_limit: int
    table: BlockTable
    computed: int = 0
    answer_start: int = 0

    @property
    def drawing_temperature(self) -> float:
        return self.temperature if self.answer_start else USER_TEMPERATURE


@dataclass(slots=True)
class RolloutRun:
    """Fills `batch` places and steps them together. `accept` is given each rollout that ended."""

    engine: Engine
    tokenizer: Tokenizer
    recipe: Recipe
    batch: int
    done: Callable[[int], bool]
    excluded: Callable[[str], bool]
    _frame: ChatFrame = field(init=False)
    _slots: list[_Slot] = field(init=False, default_factory=list)
    _next_number: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._frame = ChatFrame.of(self.tokenizer)

    def step(self) -> list[Rollout]:
        """One target forward; the rollouts that ended in it."""
        while len(self._slots) < self.batch:
            self._slots.append(self._open())
        sequences = [self._rows(slot) for slot in self._slots]
        result = self.engine.step(sequences)
        drawing = [
            slot for slot, rows in zip(self._slots, sequences, strict=True) if rows.logit_rows == "last"
        ]
        for slot, rows in zip(self._slots, sequences, strict=True):
            slot.computed += len(rows.token_ids)
            self.engine.kv.commit(slot.table, slot.computed, keep_reserved=True)
        ended: list[Rollout] = []
        for slot, token_id in zip(drawing, _draw(result.logits, drawing), strict=True):
            if self._append(slot, token_id):
                self._close(slot)
                if self._is_wanted(slot):
                    ended.append(_rollout(slot))
        return ended

    def close(self) -> None:
        """Give all blocks back."""
        for slot in list(self._slots):
            self._close(slot)

    def _open(self) -> _Slot:
        while self.done(self._next_number):
            self._next_number += 1
        number = self._next_number
        self._next_number += 1
        noise = np.random.default_rng((self.recipe.seed, number))
        temperatures = self.recipe.temperatures
        class_name, words = opening(number)
        token_ids = [*self._frame.head, *self.tokenizer.encode(words)]
        user_limit = len(token_ids) + int(noise.integers(8, self.recipe.user_tokens + 1))
        temperature = temperatures[int(noise.integers(len(temperatures)))]
        return _Slot(number, class_name, temperature, noise, token_ids, user_limit, self.engine.kv.open())

    def _rows(self, slot: _Slot) -> SequenceStep:
        end = min(slot.computed + PROMPT_ROWS, len(slot.token_ids))
        self.engine.kv.reserve(slot.table, end)
        last = end == len(slot.token_ids)
        return SequenceStep(
            slot.table,
            slot.computed,
            slot.token_ids[slot.computed : end],
            logit_rows="last" if last else "none",
        )

    def _append(self, slot: _Slot, token_id: int) -> bool:
        """Take a drawn token; whether the rollout has ended."""
        ends = token_id in self._frame.end_ids
        if slot.answer_start:
            slot.token_ids.append(token_id)
            return ends or len(slot.token_ids) - slot.answer_start >= self.recipe.answer_tokens
        if not ends:
            slot.token_ids.append(token_id)
        if ends or len(slot.token_ids) >= slot.user_limit:
            slot.token_ids += self._frame.tail
            slot.answer_start = len(slot.token_ids)
        return False

    def _is_wanted(self, slot: _Slot) -> bool:
        user = slot.token_ids[len(self._frame.head) : slot.answer_start - len(self._frame.tail)]
        text = self.tokenizer.decode(user).strip()
        return bool(text) and not self.excluded(text)

    def _close(self, slot: _Slot) -> None:
        self.engine.kv.close(slot.table)
        self._slots.remove(slot)


def blocks_needed(
    user_tokens: int, answer_tokens: int, batch: int, block_size: int, longest_frame: int = 256
) -> int:
    """KV blocks for `batch` rollouts at their longest; `longest_frame`: tokens of template and opening."""
    longest = longest_frame + user_tokens + answer_tokens
    return batch * (-(-longest // block_size) + 1)


def _rollout(slot: _Slot) -> Rollout:
    return Rollout(slot.number, slot.class_name, slot.temperature, slot.answer_start, tuple(slot.token_ids))


def _draw(logits: Tensor, slots: Sequence[_Slot]) -> list[int]:
    """One token for each row of `logits` [slots, vocabulary]: the best, or by top-k, top-p and the slot's own noise."""
    drawn = [0] * len(slots)
    sampled = [row for row, slot in enumerate(slots) if slot.drawing_temperature > 0]
    greedy = [row for row, slot in enumerate(slots) if slot.drawing_temperature == 0]
    for row, token_id in zip(greedy, logits[greedy].argmax(dim=1).tolist(), strict=True):
        drawn[row] = token_id
    if not sampled:
        return drawn
    best, ids = torch.topk(logits[sampled], min(TOP_K, logits.shape[1]), dim=1)
    values: Any = best.double().numpy()
    for place, row in enumerate(sampled):
        weights = np.exp((values[place] - values[place][0]) / slots[row].drawing_temperature)
        total = np.cumsum(weights / weights.sum())
        kept = int(np.searchsorted(total, TOP_P)) + 1
        chosen = int(np.searchsorted(total[:kept], slots[row].noise.random() * total[kept - 1], side="right"))
        drawn[row] = int(ids[place, min(chosen, kept - 1)])
    return drawn
