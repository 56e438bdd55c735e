"""Counter-based noise: a pure function of (seed, choice, position, stream, token id).

    key(seed, choice, position, stream): k = mix(seed + G); k = mix((k ^ x) + G) for x = choice, position, stream
    u(v) = max(1, mix(key + (v + 1) · G) >> 11) · 2^-53        53 bits, never 0 or 1
    exponential(v) = -log u(v);  gumbel(v) = -log exponential(v)

`mix` is the finaliser of splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators",
2014, with Stafford's Mix13 constants), G its golden-ratio increment. `kernels/arithmetic.h` is the native twin.

argmax_v(log t(v) + gumbel(v)) is computed as the exponential race argmin_v exponential(v) / t(v): minus the
logarithm turns one into the other, and it is one logarithm instead of two.
"""

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from decode.sampling.arithmetic import Float64, Int64, natural_log

UInt64 = NDArray[np.uint64]
GOLDEN = 0x9E3779B97F4A7C15
MASK = 0xFFFFFFFFFFFFFFFF


class Stream(IntEnum):
    """Independent streams at one position. SHARED is for invariant mode, drafters included; rejection has the rest."""

    SHARED = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3
    BONUS = 4


def draft_stream(lane: int, path: Sequence[int]) -> int:
    """The DRAFT stream of one node: behind the draft tokens `path`, in one of several independent lanes.

    Every node has noise of its own, so that neither what was drawn elsewhere in the tree nor an earlier step that
    drafted the same position says anything about its children. The lowest three bits are DRAFT, so that no
    other stream is met; lane 0 with an empty path is DRAFT itself.
    """
    key = _mix((lane + GOLDEN) & MASK) if path else lane
    for token_id in path:
        key = _mix(((key ^ token_id) + GOLDEN) & MASK)
    return (key << 3 & MASK) | Stream.DRAFT


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def noise_key(seed: int, choice: int, position: int, stream: int = Stream.SHARED) -> int:
    """The 64-bit key of one draw."""
    key = _mix((seed + GOLDEN) & MASK)
    for part in (choice, position, int(stream)):
        key = _mix(((key ^ part) + GOLDEN) & MASK)
    return key


def uniforms(key: int, token_ids: Int64) -> Float64:
    """53-bit uniforms in (0, 1) of the given token ids."""
    values: UInt64 = (token_ids.astype(np.uint64) + np.uint64(1)) * np.uint64(GOLDEN) + np.uint64(key)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    values = (values ^ (values >> np.uint64(31))) >> np.uint64(11)
    return np.maximum(values, np.uint64(1)).astype(np.float64) * 2.0**-53


def uniform(key: int, token_id: int = 0) -> float:
    """One uniform; accept decisions put the number of the trial in the place of the token id."""
    return float(max(1, _mix((key + (token_id + 1) * GOLDEN) & MASK) >> 11)) * 2.0**-53


def exponentials(key: int, token_ids: Int64) -> Float64:
    """-log u: the arrival times of a race with unit rates."""
    return -natural_log(uniforms(key, token_ids))


def gumbel(seed: int, choice: int, position: int, token_ids: Int64, stream: int = Stream.SHARED) -> Float64:
    """The Gumbel noise of the given *target* token ids; best-first trees rank by log d + this."""
    return -natural_log(exponentials(noise_key(seed, choice, position, stream), token_ids))


def race(weights: Float64, key: int, token_ids: Int64 | None = None) -> int:
    """The id drawn from unnormalised weights (ids ascending, or `token_ids`); ties to the lowest id.

    Raises ValueError where no weight is positive.
    """
    positive = np.flatnonzero(weights > 0.0)
    if positive.size == 0:
        raise ValueError("no positive weight to draw from")
    ids = positive if token_ids is None else token_ids[positive]
    times = exponentials(key, ids) / weights[positive]
    return int(ids[times == times.min()].min())


def earliest(weights: Float64, key: int, wanted: int) -> list[int]:
    """Up to `wanted` ids drawn one after another without replacement; ties to the lowest id, weight 0 never.

    The first arrivals of the race: the ids with the largest log weight + gumbel (Kool, van Hoof, Welling 2019).
    """
    positive = np.flatnonzero(weights > 0.0)
    with np.errstate(over="ignore"):
        times = exponentials(key, positive) / weights[positive]
    order = np.argsort(times, kind="stable")[:wanted]
    return [int(index) for index in positive[order[np.isfinite(times[order])]]]
