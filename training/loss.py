"""Soft cross-entropy behind a matrix product, without the logits ever being whole in memory.

A batch has thousands of rows of 8,192 logits: written out, read by the softmax, read again by its gradient, they cost
more time than the product itself on a CPU. Here a few hundred rows at a time go through product, softmax and gradient
while they are in the cache, so the backward pass has nothing left to do but scale.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final, cast

import torch
from torch import Tensor

from engine.native import cpu_flags
from training.batch import computing_dtype

_CHUNK_ROWS: Final = 256


def soft_cross_entropy(hidden: Tensor, matrix: Tensor, probs: Tensor) -> Tensor:
    """Mean of -Σ_v probs(v) · log_softmax(hidden · matrixᵀ)(v) over rows; 0 where there are none.

    hidden: Tensor  # [rows, hidden_dim]; matrix: Tensor  # [draft_vocab, hidden_dim]
    probs: Tensor  # [rows, draft_vocab] float32, each row summing to 1; constant
    """
    return _cross_entropy(hidden, matrix, probs.__getitem__)


def distilled_cross_entropy(hidden: Tensor, final: Tensor, matrix: Tensor) -> Tensor:
    """As `soft_cross_entropy`, against softmax(final · matrixᵀ): over a whole vocabulary, of which no row is kept.

    Its gradient is that of KL(target ‖ draft). hidden, final: Tensor  # [rows, hidden_dim]; final constant
    matrix: Tensor  # [vocabulary, hidden_dim], constant
    """
    weights = matrix.to(computing_dtype())

    def probs(rows: slice) -> Tensor:
        return torch.softmax((final[rows].to(weights.dtype) @ weights.T).float(), dim=-1)

    return _cross_entropy(hidden, weights, probs)


def _cross_entropy(hidden: Tensor, matrix: Tensor, probs_of: Callable[[slice], Tensor]) -> Tensor:
    if len(hidden) == 0:
        return hidden.sum()
    return cast(Tensor, _SoftCrossEntropy.apply(hidden, matrix, probs_of))  # type: ignore[no-untyped-call]


def reduced_precision() -> AbstractContextManager[Any]:
    """bfloat16 products where the CPU multiplies them (AMX, AVX512-BF16): several times float32's speed there.

    Elsewhere float32, as emulated bfloat16 is slower. Parameters, their gradients, the optimiser and everything over
    the vocabulary stay float32 always, so that small updates are not rounded away.
    """
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=_multiplies_bfloat16())


@functools.lru_cache(maxsize=1)
def _multiplies_bfloat16() -> bool:
    return bool({"amx_bf16", "avx512_bf16"} & set(cpu_flags().split()))


class _SoftCrossEntropy(torch.autograd.Function):
    """d loss / d logits = (softmax(logits) - probs) / rows, as each row of probs sums to 1."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, matrix: Tensor, probs_of: Callable[[slice], Tensor]) -> Tensor:
        dtype = computing_dtype()
        rows, weights = hidden.to(dtype), matrix.to(dtype)
        num_rows = len(rows)
        wants_matrix = ctx.needs_input_grad[1]
        slopes = rows.new_empty((num_rows, len(weights)) if wants_matrix else (0, 0))
        hidden_slope = torch.empty_like(rows)
        total = torch.zeros(())
        for start in range(0, num_rows, _CHUNK_ROWS):
            part = slice(start, start + _CHUNK_ROWS)
            probs = probs_of(part)
            log_probs = torch.log_softmax((rows[part] @ weights.T).float(), dim=-1)
            total -= (log_probs * probs).sum()
            slope = log_probs.exp_().sub_(probs).div_(num_rows).to(dtype)
            hidden_slope[part] = slope @ weights
            if wants_matrix:
                slopes[part] = slope
        matrix_slope = (slopes.T @ rows).to(matrix.dtype) if wants_matrix else None
        ctx.save_for_backward(hidden_slope.to(hidden.dtype), matrix_slope)
        return total / num_rows

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None]:
        hidden_slope, matrix_slope = cast("tuple[Tensor, Tensor | None]", ctx.saved_tensors)
        scale = gradients[0]
        return hidden_slope * scale, None if matrix_slope is None else matrix_slope * scale, None
