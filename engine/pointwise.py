"""Row-wise operations between the linears, behind one Protocol: our kernels, or torch's.

Both follow Hugging Face Llama: RMSNorm in float32, its result rounded before the weight is applied;
SiLU in float32, rounded before the product. Every row is computed alone.
"""

import ctypes
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from engine.native import NativeKernels


class Pointwise(Protocol):
    """What a layer needs besides linears and attention."""

    def add_norm(self, residual: Tensor, delta: Tensor | None, weight: Tensor) -> Tensor:
        """Add `delta` to `residual` in place; the normed sum. All but weight: [rows, dim]."""

    def silu_multiply(self, gate_up: Tensor) -> Tensor:
        """silu(gate) · up for gate_up [rows, 2 · dim]: [rows, dim]."""


class TorchPointwise:
    """Any device, any width."""

    def __init__(self, epsilon: float) -> None:
        self._epsilon = epsilon

    def add_norm(self, residual: Tensor, delta: Tensor | None, weight: Tensor) -> Tensor:
        """See `Pointwise`."""
        if delta is not None:
            residual.add_(delta)
        wide = residual.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._epsilon)
        return weight * (wide * scale).to(residual.dtype)

    def silu_multiply(self, gate_up: Tensor) -> Tensor:
        """See `Pointwise`."""
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate) * up


class NativePointwise:
    """Our kernels: CPU, contiguous rows, widths that are multiples of 16."""

    def __init__(self, kernels: NativeKernels, dtype: torch.dtype, epsilon: float) -> None:
        suffix = str(dtype).removeprefix("torch.")
        pointer, whole = ctypes.c_void_p, ctypes.c_int64
        self._add_norm = kernels.library[f"outrider_add_norm_{suffix}"]
        self._add_norm.argtypes = [pointer, pointer, pointer, pointer, whole, ctypes.c_int, ctypes.c_float]
        self._add_norm.restype = None
        self._silu_multiply = kernels.library[f"outrider_silu_multiply_{suffix}"]
        self._silu_multiply.argtypes = [pointer, pointer, whole, ctypes.c_int]
        self._silu_multiply.restype = None
        self._epsilon = epsilon

    def add_norm(self, residual: Tensor, delta: Tensor | None, weight: Tensor) -> Tensor:
        """See `Pointwise`."""
        normed = torch.empty_like(residual)
        num_rows, dim = residual.shape
        self._add_norm(
            residual.data_ptr(),
            None if delta is None else delta.data_ptr(),
            weight.data_ptr(),
            normed.data_ptr(),
            num_rows,
            dim,
            self._epsilon,
        )
        return normed

    def silu_multiply(self, gate_up: Tensor) -> Tensor:
        """See `Pointwise`."""
        num_rows, width = gate_up.shape
        product = gate_up.new_empty((num_rows, width // 2))
        self._silu_multiply(gate_up.data_ptr(), product.data_ptr(), num_rows, width // 2)
        return product
