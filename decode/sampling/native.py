"""The native sampling kernel behind plain functions. Built once a machine by `engine.native`."""

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from decode.sampling.arithmetic import Float64, Int64
from decode.sampling.pipeline import BAD_WORDS, MIN_TOKENS, NOT_FINITE
from decode.sampling.step_items import ITEM_DTYPE, DrawItem, PackedItems, pack
from engine.native import NativeUnavailable, load_kernels

_ERRORS = {0: None, 1: NOT_FINITE, 2: BAD_WORDS, 3: MIN_TOKENS}


@dataclass(frozen=True, slots=True)
class Walk:
    """A walk down one tree: accepted rows by depth, the tokens drawn, and what left nothing to draw."""

    accepted_rows: tuple[int, ...]
    token_ids: tuple[int, ...]
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Children:
    """Distinct children of one node in the order drawn, and their log-softmax scores."""

    token_ids: tuple[int, ...]
    scores: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class LogprobRequest:
    """Raw log-probabilities wanted of a logits row: the chosen token's and the best ones'."""

    logits_row: int
    token_id: int
    num_best: int


@functools.lru_cache(maxsize=1)
def kernels() -> ctypes.CDLL | None:
    """The library; None where it cannot be built, and the numpy reference serves."""
    try:
        library = load_kernels(Path(__file__).parent / "kernels").library
    except NativeUnavailable:
        return None
    whole, pointer = ctypes.c_int64, ctypes.c_void_p
    library.outrider_walk.argtypes = [pointer, whole, pointer, whole, *[pointer] * 5, whole]
    library.outrider_walk.restype = None
    library.outrider_probs.argtypes = [pointer, whole, pointer, pointer, pointer, pointer]
    library.outrider_probs.restype = whole
    library.outrider_earliest.argtypes = [pointer, whole, ctypes.c_uint64, whole, pointer]
    library.outrider_earliest.restype = whole
    library.outrider_children.argtypes = [pointer, whole, pointer, whole, *[pointer] * 7, whole]
    library.outrider_children.restype = None
    library.outrider_logprobs.argtypes = [pointer, whole, pointer, pointer, whole, pointer, pointer, whole]
    library.outrider_logprobs.restype = None
    library.outrider_item_bytes.restype = whole
    assert library.outrider_item_bytes() == ITEM_DTYPE.itemsize
    return library


def walk(library: ctypes.CDLL, draws: Sequence[DrawItem], logits: torch.Tensor) -> list[Walk]:
    """Walk every item's tree on `logits` [rows, vocabulary] float32, contiguous, on the CPU."""
    packed = pack(draws)
    results, outcomes = walk_packed(library, packed, logits)
    drawn = results.tolist()
    return [
        walk_of(drawn, start, outcome)
        for start, outcome in zip(packed.items["result"].tolist(), outcomes.tolist(), strict=True)
    ]


def walk_packed(library: ctypes.CDLL, packed: PackedItems, logits: torch.Tensor) -> tuple[Int64, Int64]:
    """Walk packed items: tokens drawn and rows accepted, [2, results], and outcomes [items, 3]; see `walk_of`."""
    drawn = np.zeros((2, packed.num_results), np.int64)
    outcomes = np.empty((len(packed.items), 3), np.int64)
    library.outrider_walk(
        logits.data_ptr(), logits.shape[1], packed.items.ctypes.data, len(packed.items),
        packed.pool.ctypes.data, packed.values.ctypes.data,
        drawn[0].ctypes.data, drawn[1].ctypes.data, outcomes.ctypes.data, torch.get_num_threads(),
    )  # fmt: skip
    return drawn, outcomes


def walk_of(drawn: Sequence[Sequence[int]], start: int, outcome: Sequence[int]) -> Walk:
    """One item's walk: its results begin at `start`, `outcome` is (tokens, accepted rows, error)."""
    num_drawn, num_accepted, error = outcome
    return Walk(
        tuple(drawn[1][start : start + num_accepted]),
        tuple(drawn[0][start : start + num_drawn]),
        _ERRORS[error],
    )


def probs(library: ctypes.CDLL, draw: DrawItem, logits: torch.Tensor) -> Float64 | str:
    """[vocabulary] float64 after the whole pipeline at the draw's row, or the error."""
    packed = pack([draw])
    out = np.empty(logits.shape[1], np.float64)
    error = library.outrider_probs(
        logits.data_ptr(), logits.shape[1], packed.items.ctypes.data,
        packed.pool.ctypes.data, packed.values.ctypes.data, out.ctypes.data,
    )  # fmt: skip
    return _ERRORS[error] or out


def earliest(library: ctypes.CDLL, weights: Float64, key: int, wanted: int) -> list[int]:
    """Up to `wanted` ids drawn without replacement from unnormalised weights, in order."""
    weights = np.ascontiguousarray(weights)
    token_ids = np.empty(wanted, np.int64)
    drawn = library.outrider_earliest(weights.ctypes.data, weights.size, key, wanted, token_ids.ctypes.data)
    drawn_ids: list[int] = token_ids[:drawn].tolist()
    return drawn_ids


def children(
    library: ctypes.CDLL, draws: Sequence[DrawItem], widths: Sequence[int], logits: torch.Tensor
) -> list[Children | None]:
    """Up to widths[i] children of draw i; None where nothing can be drawn."""
    packed = pack(draws)
    wanted = np.minimum(np.array(widths, np.int64), logits.shape[1])
    ends = np.cumsum(wanted)
    starts = ends - wanted
    ids, scores = np.empty(int(ends[-1]), np.int64), np.empty(int(ends[-1]), np.float64)
    counts = np.empty(len(draws), np.int64)
    library.outrider_children(
        logits.data_ptr(), logits.shape[1], packed.items.ctypes.data, len(draws),
        packed.pool.ctypes.data, packed.values.ctypes.data, wanted.ctypes.data, starts.ctypes.data,
        ids.ctypes.data, scores.ctypes.data, counts.ctypes.data, torch.get_num_threads(),
    )  # fmt: skip
    all_ids, all_scores = ids.tolist(), scores.tolist()
    found: list[Children | None] = []
    for start, count in zip(starts.tolist(), counts.tolist(), strict=True):
        end = start + count
        found.append(
            Children(tuple(all_ids[start:end]), tuple(all_scores[start:end])) if count >= 0 else None
        )
    return found


def logprobs(
    library: ctypes.CDLL, requests: Sequence[LogprobRequest], logits: torch.Tensor
) -> list[list[tuple[int, float]]]:
    """For each request the chosen (id, logprob), then the best in order."""
    wanted: Int64 = np.array([(r.logits_row, r.token_id, r.num_best) for r in requests], np.int64)
    ends = np.cumsum(wanted[:, 2] + 1)
    starts = ends - (wanted[:, 2] + 1)
    ids, values = np.empty(int(ends[-1]), np.int64), np.empty(int(ends[-1]), np.float64)
    library.outrider_logprobs(
        logits.data_ptr(), logits.shape[1], wanted.ctypes.data, starts.ctypes.data, len(requests),
        ids.ctypes.data, values.ctypes.data, torch.get_num_threads(),
    )  # fmt: skip
    pairs = list(zip(ids.tolist(), values.tolist(), strict=True))
    return [
        [pair for pair in pairs[start:end] if pair[0] >= 0]
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
    ]
