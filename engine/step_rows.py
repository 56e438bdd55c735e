"""The index arrays of one step, made once and read by every layer; and the checks before a step.

Row order is that of the sequences, row 0 of each first. `tail_slots` lists, path by path, the slots of
positions start, start + 1, …: its first entries are the write slots of all rows (a chain's tail is a
slice of them), behind them lies one list for each row of a tree.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.step_batch import SequenceStep

IntArray = np.ndarray[Any, np.dtype[np.int32]]


class StepRefused(ValueError):
    """The step's rows contradict its tables or the model; nothing was touched."""


@dataclass(frozen=True, slots=True)
class StepRows:
    """Flat rows of a step.

    token_ids, positions, tail_begin: [rows]; the others have one entry for each sequence, save
    `tail_slots` and `block_ids`, which lie one behind another. `row_begin` has one entry more.
    `sequence_start`: first position that is no row's; a chain's written rows count as committed here.
    `wanted_rows`: rows whose logits are asked for, None for all of them.
    """

    token_ids: np.ndarray[Any, np.dtype[np.int64]]
    positions: IntArray
    tail_begin: IntArray
    tail_slots: IntArray
    block_ids: IntArray
    row_begin: tuple[int, ...]
    sequence_start: IntArray
    sequence_chain: IntArray
    sequence_blocks: IntArray
    wanted_rows: tuple[int, ...] | None
    logits_start: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        """Rows of all sequences."""
        return self.row_begin[-1]

    @property
    def write_slots(self) -> IntArray:
        """[rows] where each row's K, V and hidden planes go."""
        return self.tail_slots[: self.num_rows]


def check_step(
    sequences: Sequence[SequenceStep], *, block_size: int, max_context: int, vocab_size: int
) -> None:
    """Raise StepRefused unless every row fits its table, the context and the vocabulary."""
    if not sequences:
        raise StepRefused("a step needs at least one sequence")
    if len({id(sequence.table) for sequence in sequences}) != len(sequences):
        raise StepRefused("two sequences of a step share one table")
    for index, sequence in enumerate(sequences):
        _check_sequence(sequence, f"sequence {index}", block_size, max_context)
        if min(sequence.token_ids) < 0 or max(sequence.token_ids) >= vocab_size:
            raise StepRefused(f"sequence {index}: a token id is outside [0, {vocab_size})")


def _check_sequence(sequence: SequenceStep, name: str, block_size: int, max_context: int) -> None:
    table, start, num_rows = sequence.table, sequence.start, len(sequence.token_ids)
    if table.closed:
        raise StepRefused(f"{name}: its table is closed")
    if num_rows == 0:
        raise StepRefused(f"{name}: no rows")
    if start != table.num_tokens:
        raise StepRefused(f"{name}: starts at {start}, but {table.num_tokens} tokens are committed")
    if start + num_rows > len(table.block_ids) * block_size:
        capacity = len(table.block_ids) * block_size
        raise StepRefused(f"{name}: needs {start + num_rows} slots, {capacity} are reserved")
    depth = num_rows - 1
    if sequence.parents is not None:
        depth = max(_depths(sequence.parents, num_rows, name))
    if start + depth >= max_context:
        raise StepRefused(f"{name}: position {start + depth} is beyond the context of {max_context}")
    if not 0 <= sequence.num_auxiliary < num_rows:
        raise StepRefused(f"{name}: {sequence.num_auxiliary} auxiliary rows of {num_rows}")
    if not 0 <= sequence.num_written < num_rows:
        raise StepRefused(
            f"{name}: {sequence.num_written} of {num_rows} rows are written, none would be evaluated"
        )


def _depths(parents: Sequence[int], num_rows: int, name: str) -> list[int]:
    """Depth of each row. `parents[0]`, the root's, is not looked at."""
    if len(parents) != num_rows:
        raise StepRefused(f"{name}: {len(parents)} parents for {num_rows} rows")
    depths = [0]
    for row in range(1, num_rows):
        parent = parents[row]
        if not 0 <= parent < row:
            raise StepRefused(f"{name}: parent {parent} of row {row} does not come before it")
        depths.append(depths[parent] + 1)
    return depths


def is_chain(parents: Sequence[int] | None) -> bool:
    """Whether every row is the child of the row before it."""
    return parents is None or all(parents[row] == row - 1 for row in range(1, len(parents)))


def build_rows(sequences: Sequence[SequenceStep], block_size: int) -> StepRows:
    """Index arrays of checked sequences."""
    row_begin = [0]
    for sequence in sequences:
        row_begin.append(row_begin[-1] + sequence.num_rows)
    tails = _Tails(row_begin[-1])
    blocks: list[int] = []
    sequence_blocks: list[int] = []
    positions: list[IntArray] = []
    starts: list[int] = []
    chains: list[bool] = []
    for first_row, sequence in zip(row_begin, sequences, strict=False):
        sequence_blocks.append(len(blocks))
        blocks.extend(sequence.table.block_ids)
        slots = _row_slots(sequence, block_size)
        written = sequence.num_written
        chains.append(is_chain(sequence.parents))
        if chains[-1]:
            tails.add_chain(first_row, slots[written:])
            depths = np.arange(written, len(slots), dtype=np.int32)
        else:
            depths = tails.add_tree(first_row, slots, sequence.parents or (), written)
        starts.append(sequence.start + (written if chains[-1] else 0))
        positions.append(depths + np.int32(sequence.start))
    wanted, logits_start = _wanted_rows(sequences, row_begin)
    return StepRows(
        token_ids=np.concatenate(
            [np.asarray(sequence.token_ids[sequence.num_written :], dtype=np.int64) for sequence in sequences]
        ),
        positions=np.concatenate(positions, dtype=np.int32),
        tail_begin=tails.begin,
        tail_slots=tails.slots(),
        block_ids=np.array(blocks, dtype=np.int32),
        row_begin=tuple(row_begin),
        sequence_start=np.array(starts, dtype=np.int32),
        sequence_chain=np.array(chains, dtype=np.int32),
        sequence_blocks=np.array(sequence_blocks, dtype=np.int32),
        wanted_rows=wanted,
        logits_start=logits_start,
    )


class _Tails:
    """Collects the write slots and, for trees, each row's path behind the committed prefix."""

    def __init__(self, num_rows: int) -> None:
        self.begin: IntArray = np.empty(num_rows, dtype=np.int32)
        self._write: list[IntArray] = []
        self._paths: list[int] = []
        self._num_rows = num_rows

    def add_chain(self, first_row: int, slots: IntArray) -> None:
        self.begin[first_row : first_row + len(slots)] = first_row
        self._write.append(slots)

    def add_tree(self, first_row: int, slots: IntArray, parents: Sequence[int], written: int) -> IntArray:
        """Slots of all rows, of which the first `written` are not evaluated. Returns the depths of the others."""
        own = slots.tolist()
        paths: list[list[int]] = [[own[0]]]
        for row in range(1, len(own)):
            paths.append([*paths[parents[row]], own[row]])
        for row, path in enumerate(paths[written:]):
            self.begin[first_row + row] = self._num_rows + len(self._paths)
            self._paths.extend(path)
        self._write.append(slots[written:])
        return np.array([len(path) - 1 for path in paths[written:]], dtype=np.int32)

    def slots(self) -> IntArray:
        return np.concatenate([*self._write, np.array(self._paths, dtype=np.int32)], dtype=np.int32)


def _row_slots(sequence: SequenceStep, block_size: int) -> IntArray:
    """Slots of all rows, written ones included."""
    indices = np.arange(sequence.start, sequence.start + len(sequence.token_ids), dtype=np.int32)
    first = sequence.start // block_size
    last = (sequence.start + len(sequence.token_ids) - 1) // block_size
    blocks = np.array(sequence.table.block_ids[first : last + 1], dtype=np.int32)
    slots: IntArray = blocks[indices // block_size - first] * np.int32(block_size) + indices % block_size
    return slots.astype(np.int32, copy=False)


def _wanted_rows(
    sequences: Sequence[SequenceStep], row_begin: Sequence[int]
) -> tuple[tuple[int, ...] | None, tuple[int, ...]]:
    wanted: list[int] = []
    logits_start: list[int] = []
    for index, sequence in enumerate(sequences):
        logits_start.append(len(wanted))
        if sequence.logit_rows == "all":
            wanted.extend(range(row_begin[index], row_begin[index + 1]))
        elif sequence.logit_rows == "last":
            wanted.append(row_begin[index + 1] - 1)
    return (None if len(wanted) == row_begin[-1] else tuple(wanted)), tuple(logits_start)
