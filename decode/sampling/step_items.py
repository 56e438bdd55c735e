"""Packs the choices of a step into the flat arrays that the native kernel reads."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from core.records import SamplingParams
from decode.sampling.history import TokenHistory
from decode.sampling.noise import Stream

_WHOLE = ("logits_row", "num_nodes", "nodes", "path", "path_count")
_KEYS = ("seed", "choice", "position", "stream")
_REAL = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")
_LISTS = (
    "prompt", "prompt_count", "output", "output_count", "bias", "bias_count", "bias_values",
    "bad_words", "bad_words_count", "tail", "tail_count", "stops", "stops_count", "min_remaining", "result",
)  # fmt: skip
ITEM_DTYPE = np.dtype(
    [(name, np.int64) for name in _WHOLE]
    + [(name, np.uint64) for name in _KEYS]
    + [("top_k", np.int64)]
    + [(name, np.float64) for name in _REAL]
    + [(name, np.int64) for name in _LISTS]
)
"""Mirrors `struct Item` of kernels/constraints.h."""


@dataclass(frozen=True, slots=True)
class DrawItem:
    """One walk of the kernel: a tree (or none) behind a logits row, past the draft tokens `path`.

    `position` is that of the token drawn at the root, after `path`. Node j's logits row is logits_row + 1 + j.
    `stream` is a `Stream` or a `draft_stream`.
    """

    sampling: SamplingParams
    seed: int
    choice: int
    position: int
    history: TokenHistory
    logits_row: int
    stream: int = Stream.SHARED
    path: tuple[int, ...] = ()
    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()


@dataclass(slots=True)
class PackedItems:
    """`items` [n] ITEM_DTYPE, `pool` int64, `values` float64; `num_results` = Σ (nodes + 1)."""

    items: NDArray[np.void]
    pool: NDArray[np.int64]
    values: NDArray[np.float64]
    num_results: int


@dataclass(slots=True)
class _Pool:
    ids: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, ids: Sequence[int]) -> int:
        start = len(self.ids)
        self.ids.extend(ids)
        return start


def pack(draws: Sequence[DrawItem]) -> PackedItems:
    """The arrays of one kernel call."""
    pool = _Pool()
    rows: list[tuple[float, ...]] = []
    num_results = 0
    for item in draws:
        rows.append(_pack_one(item, pool, num_results))
        num_results += len(item.token_ids) + 1
    return PackedItems(
        items=np.array(rows, dtype=ITEM_DTYPE),
        pool=np.array(pool.ids or [0], dtype=np.int64),
        values=np.array(pool.values or [0.0], dtype=np.float64),
        num_results=num_results,
    )


def _pack_one(item: DrawItem, pool: _Pool, result: int) -> tuple[float, ...]:
    sampling = item.sampling
    nodes = pool.add(item.token_ids)
    pool.add(item.parents)
    head = (item.logits_row, len(item.token_ids), nodes, pool.add(item.path), len(item.path))
    keys = (item.seed, item.choice, item.position, item.stream, sampling.top_k)
    temperature = 0.0 if sampling.greedy else sampling.temperature
    penalties = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
    lists = (*_penalty_lists(item, pool), *_bias_lists(item, pool), *_word_lists(item, pool))
    stops: tuple[int, ...] = ()
    min_remaining = sampling.min_tokens - item.history.num_output
    if min_remaining > 0:
        stops = (*sampling.eos_token_ids, *sampling.stop_token_ids)
    tail = (pool.add(stops), len(stops), min_remaining, result)
    return (*head, *keys, temperature, sampling.top_p, sampling.min_p, *penalties, *lists, *tail)


def _penalty_lists(item: DrawItem, pool: _Pool) -> tuple[int, int, int, int]:
    sampling = item.sampling
    if (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (
        1.0,
        0.0,
        0.0,
    ):
        return (0, 0, 0, 0)
    prompt_ids = item.history.distinct_prompt_ids if sampling.repetition_penalty != 1.0 else ()
    counts = item.history.output_counts
    prompt = pool.add(prompt_ids)
    output = pool.add([value for pair in counts.items() for value in pair])
    return (prompt, len(prompt_ids), output, len(counts))


def _bias_lists(item: DrawItem, pool: _Pool) -> tuple[int, int, int]:
    bias = item.sampling.logit_bias
    if not bias:
        return (0, 0, 0)
    start = len(pool.values)
    pool.values.extend(bias.values())
    return (pool.add(tuple(bias)), len(bias), start)


def _word_lists(item: DrawItem, pool: _Pool) -> tuple[int, int, int, int]:
    words = [word for word in item.sampling.bad_word_ids if word]
    if not words:
        return (0, 0, 0, 0)
    flat: list[int] = []
    for word in words:
        flat.extend((len(word), *word))
    longest = max(len(word) for word in words) - 1
    tail = item.history.token_ids[-longest:] if longest else []
    return (pool.add(flat), len(words), pool.add(tail), len(tail))
