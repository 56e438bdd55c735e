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
from decode.sampling.step_items import ITEM_DTYPE, DrawItem, pack
from engine.native import NativeUnavailable, load_kernels

_ERRORS = {0: None, 1: NOT_FINITE, 2: BAD_WORDS, 3: MIN_TOKENS}


@dataclass(frozen=True, slots=True)
class Walk:
    """A walk down one tree: accepted rows by depth, the tokens drawn, and what left nothing to draw."""

    accepted_rows: tuple[int, ...]
    token_ids: tuple[int, ...]
    error: str | None = None


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
    library.outrider_race.argtypes = [pointer, whole, ctypes.c_uint64]
    library.outrider_race.restype = whole
    library.outrider_logprobs.argtypes = [pointer, whole, pointer, pointer, whole, pointer, pointer, whole]
    library.outrider_logprobs.restype = None
    library.outrider_item_bytes.restype = whole
    assert library.outrider_item_bytes() == ITEM_DTYPE.itemsize
    return library


def walk(library: ctypes.CDLL, draws: Sequence[DrawItem], logits: torch.Tensor) -> list[Walk]:
    """Walk every item's tree on `logits` [rows, vocabulary] float32, contiguous, on the CPU."""
    packed = pack(draws)
    tokens, rows, outcomes = (
        np.empty((2, packed.num_results), np.int64),
        None,
        np.empty((len(draws), 3), np.int64),
    )
    rows = tokens[1]
    library.outrider_walk(
        logits.data_ptr(), logits.shape[1], packed.items.ctypes.data, len(draws),
        packed.pool.ctypes.data, packed.values.ctypes.data,
        tokens.ctypes.data, rows.ctypes.data, outcomes.ctypes.data, torch.get_num_threads(),
    )  # fmt: skip
    starts = packed.items["result"].tolist()
    drawn_ids, accepted = tokens.tolist()
    walks = []
    for start, (num_drawn, num_accepted, error) in zip(starts, outcomes.tolist(), strict=True):
        walks.append(
            Walk(
                tuple(accepted[start : start + num_accepted]),
                tuple(drawn_ids[start : start + num_drawn]),
                _ERRORS[error],
            )
        )
    return walks


def probs(library: ctypes.CDLL, draw: DrawItem, logits: torch.Tensor) -> Float64 | str:
    """[vocabulary] float64 after the whole pipeline at the draw's row, or the error."""
    packed = pack([draw])
    out = np.empty(logits.shape[1], np.float64)
    error = library.outrider_probs(
        logits.data_ptr(), logits.shape[1], packed.items.ctypes.data,
        packed.pool.ctypes.data, packed.values.ctypes.data, out.ctypes.data,
    )  # fmt: skip
    return _ERRORS[error] or out


def race(library: ctypes.CDLL, weights: Float64, key: int) -> int:
    """The id drawn from unnormalised weights; -1 where none is positive."""
    weights = np.ascontiguousarray(weights)
    return int(library.outrider_race(weights.ctypes.data, weights.size, key))


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
