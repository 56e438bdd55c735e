"""Sampling arithmetic in numpy, bit for bit that of `kernels/arithmetic.h`.

Only IEEE double additions, multiplications, divisions and exponent shifts, in a fixed order and without
fused multiply-add, so any machine and either implementation gives the same bits. libm and numpy's own exp
and log differ in the last bit from one version to the next; at a top-p border that is another token.
"""

import math

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]
Float32 = NDArray[np.float32]
Int64 = NDArray[np.int64]

LANES = 8
LOG2_E = 1.4426950408889634
LN2_HIGH = float.fromhex("0x1.62e42fee00000p-1")
LN2_LOW = float.fromhex("0x1.a39ef35793c76p-33")
ROUND = 6755399441055744.0
SMALLEST = -708.0
INVERSE_FACTORIALS = tuple(1.0 / math.factorial(k) for k in range(13, -1, -1))
SQRT_HALF = 0.7071067811865476


def exp_weights(exponents: Float64) -> Float64:
    """exp of exponents ≤ 0 (0 below -708): 2^n times the Taylor polynomial of degree 13 in s - n ln 2."""
    clamped = np.where(exponents < SMALLEST, 0.0, exponents)
    shifted = clamped * LOG2_E + ROUND
    whole = shifted - ROUND
    rest = (clamped - whole * LN2_HIGH) - whole * LN2_LOW
    total = np.full_like(rest, INVERSE_FACTORIALS[0])
    for coefficient in INVERSE_FACTORIALS[1:]:
        total = total * rest + coefficient
    scaled = total.view(np.int64) + (shifted.view(np.int64) << 52)
    return np.where(exponents < SMALLEST, 0.0, scaled.view(np.float64))


def natural_log(values: Float64) -> Float64:
    """log of finite values > 0: exponent · ln 2 + 2 artanh((m - 1) / (m + 1)), m in [√½, √2)."""
    mantissa, exponent = np.frexp(values)
    small = mantissa < SQRT_HALF
    mantissa = np.where(small, mantissa * 2.0, mantissa)
    power = (exponent - small).astype(np.float64)
    ratio = (mantissa - 1.0) / (mantissa + 1.0)
    square = ratio * ratio
    total = np.full_like(ratio, 1.0 / 25.0)
    for odd in range(23, 0, -2):
        total = total * square + 1.0 / odd
    result: Float64 = power * LN2_HIGH + ((ratio + ratio) * total + power * LN2_LOW)
    return result


def lane_sum(values: Float64) -> float:
    """Sum in the fixed order of the kernel: lane j adds values j, j + 8, …; then the lanes pairwise."""
    padded = np.zeros(-(-values.size // LANES) * LANES)
    padded[: values.size] = values
    lanes = np.cumsum(padded.reshape(-1, LANES), axis=0)[-1]
    return float(
        ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]))
    )


def descending_order(logits: Float32) -> Int64:
    """Ids by (logit descending, id ascending): the order in which every border is cut."""
    return np.argsort(-logits, kind="stable").astype(np.int64)
