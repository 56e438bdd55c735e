"""Weights in 8 or 4 bits, for drafts: half or a good quarter of the bytes that a step reads, for some acceptance.

That pays for `FEW_ROWS` rows at most: these kernels take as long for each row as for the first, and for a prompt thirty
times as long as the plain product, which `engine/linear.py` takes for more rows.

int8: symmetric, one scale an output row. int4: one scale and one zero for each `INT4_GROUP` inputs of an output row.
The products are torch's weight-only kernels for CPUs; activations stay in bfloat16.
"""

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from core.drafter_settings import Quantisation
from core.errors import InvalidArgument

INT4_GROUP: Final = 32
FEW_ROWS: Final = 3
"""Measured on AVX-512: 1 row 0.5, 3 rows 0.8 (int4) to 1.0 (int8), 8 rows 2 × the plain product's time."""
_INT4_OUTPUTS: Final = 16
_INT8_INPUTS: Final = 16
"""The kernel reads beyond rows of another length."""
_TINY: Final = 1e-8


def quantised_product(weight: Tensor, quantisation: Quantisation) -> Callable[[Tensor], Tensor]:
    """The product x → x·weightᵀ for weight [outputs, inputs], rounded to `quantisation`.

    x [rows, inputs]; computed in bfloat16. Raises InvalidArgument for a device or a shape that the kernels do not take.
    """
    if weight.device.type != "cpu":
        raise InvalidArgument("quantisation", f"{quantisation} weights run on CPUs only")
    outputs, inputs = weight.shape
    fits = inputs % _INT8_INPUTS == 0 if quantisation == "int8" else _fits_int4(weight)
    if not fits:
        raise InvalidArgument("quantisation", f"{quantisation} takes no matrix of {outputs} x {inputs}")
    return _int8(weight) if quantisation == "int8" else _int4(weight)


def fastest_quantisation(weight: Tensor) -> Quantisation:
    """What multiplies a few rows fastest: `int4` where it was measured to be, for bfloat16 on CPUs with AVX-512."""
    if weight.device.type != "cpu" or weight.dtype is not torch.bfloat16 or not _fits_int4(weight):
        return "none"
    return "int4" if torch.backends.cpu.get_cpu_capability().startswith("AVX512") else "none"


def _fits_int4(weight: Tensor) -> bool:
    return weight.shape[0] % _INT4_OUTPUTS == 0 and weight.shape[1] % INT4_GROUP == 0


def _int8(weight: Tensor) -> Callable[[Tensor], Tensor]:
    wide = weight.float()
    scales = (wide.abs().amax(dim=1) / 127.0).clamp_min(_TINY)
    whole = torch.round(wide / scales[:, None]).clamp(-127, 127).to(torch.int8).contiguous()
    narrow = scales.to(torch.bfloat16)
    product = torch.ops.aten._weight_int8pack_mm.default

    def multiply(rows: Tensor) -> Tensor:
        result: Tensor = product(rows.to(torch.bfloat16).contiguous(), whole, narrow)
        return result.to(rows.dtype)

    return multiply


def _int4(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """A weight is (stored - 8) · scale + zero, stored in 0 … 15."""
    outputs, inputs = weight.shape
    groups = weight.float().view(outputs, inputs // INT4_GROUP, INT4_GROUP)
    least, most = groups.amin(dim=2), groups.amax(dim=2)
    scales = ((most - least) / 15.0).clamp_min(_TINY).to(torch.bfloat16)
    zeros = (least + 8.0 * scales.float()).to(torch.bfloat16)
    stored = torch.round((groups - zeros.float()[..., None]) / scales.float()[..., None] + 8.0).clamp(0, 15)
    flat = stored.to(torch.int32).view(outputs, inputs).contiguous()
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu.default(flat, 1)
    constants = torch.stack([scales, zeros], dim=-1).transpose(0, 1).contiguous()
    product = torch.ops.aten._weight_int4pack_mm_for_cpu.default

    def multiply(rows: Tensor) -> Tensor:
        result: Tensor = product(rows.to(torch.bfloat16).contiguous(), packed, INT4_GROUP, constants)
        return result.to(rows.dtype)

    return multiply
