"""The choke point of all matrix products: weights packed once, rows grouped so that bits hold still.

On a CPU weights lie in oneDNN's own layout for M = 1 to a few rows; elsewhere as they are. A product's
bits may depend on how many rows share a call, so calls follow a `RowPlan`, found at load by probing
this model's own weights on this machine (`find_row_plan`), and part of the numerics class.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from core.drafter_settings import DraftQuantisation
from engine.quantise import FEW_ROWS, fastest_quantisation, quantised_product

PROBE_ROWS = (1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 24, 31, 32, 33, 40, 48, 63, 64, 65, 96, 128, 200, 256)
_PROBE_OFFSETS = (0, 1, 5)
_REFERENCE_ROWS = 24

PackedProduct = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class RowPlan:
    """Rows are padded to a multiple of `pad_to`; a call takes at most `max_rows` of them."""

    pad_to: int = 1
    max_rows: int | None = None

    def __str__(self) -> str:
        return f"pad={self.pad_to},max={'none' if self.max_rows is None else self.max_rows}"


CANDIDATE_PLANS = (
    RowPlan(1, None),
    RowPlan(4, None),
    RowPlan(1, 32),
    RowPlan(4, 32),
    RowPlan(1, 16),
    RowPlan(4, 16),
    RowPlan(4, 4),
    RowPlan(1, 1),
)
"""From cheap to dear. The last one is exact by construction: every row is a call of its own."""

WIDE_PLANS = (RowPlan(128, 128),)
"""For work on very many rows at once, which does not mind padding a few: training's rollouts and features. As all
calls have one shape nothing is probed, which would take longer than for the others."""


def pack(weight: Tensor, quantisation: DraftQuantisation = "none") -> PackedProduct:
    """The product x → x·weightᵀ for weight [outputs, inputs]; the caller drops its reference afterwards.

    `quantisation` is that of products with `FEW_ROWS` at most; for more rows the weight is kept as it is, too.
    Raises InvalidArgument where `quantisation` is not possible for the weight.
    """
    if quantisation is None:
        quantisation = fastest_quantisation(weight)
    if quantisation == "none":
        return _whole(weight)
    few, many = quantised_product(weight, quantisation), _whole(weight)

    def multiply(rows: Tensor) -> Tensor:
        return few(rows) if rows.shape[0] <= FEW_ROWS else many(rows)

    return multiply


def _whole(weight: Tensor) -> PackedProduct:
    if weight.device.type == "cpu" and _can_prepack(weight.dtype):
        return _prepacked(weight)
    return _plain(weight)


def _can_prepack(dtype: torch.dtype) -> bool:
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return available and (dtype is torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()))


def _prepacked(weight: Tensor) -> PackedProduct:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
    product = torch.ops.mkldnn._linear_pointwise.default

    def multiply(rows: Tensor) -> Tensor:
        result: Tensor = product(rows, packed, None, "none", [None], "")
        return result

    return multiply


def _plain(weight: Tensor) -> PackedProduct:
    kept = weight.contiguous()

    def multiply(rows: Tensor) -> Tensor:
        return functional.linear(rows, kept)

    return multiply


class Linear:
    """One packed weight under a row plan."""

    __slots__ = ("_max_rows", "_pad_to", "_product")

    def __init__(self, product: PackedProduct, plan: RowPlan) -> None:
        self._product = product
        self._pad_to = plan.pad_to
        self._max_rows = plan.max_rows

    def __call__(self, rows: Tensor) -> Tensor:  # [rows, inputs] -> [rows, outputs]
        """The product; a row's bits depend on that row only."""
        num_rows = rows.shape[0]
        if self._max_rows is not None and num_rows > self._max_rows:
            return torch.cat([self._padded(part) for part in torch.split(rows, self._max_rows)])
        return self._padded(rows)

    def _padded(self, rows: Tensor) -> Tensor:
        num_rows = rows.shape[0]
        missing = -num_rows % self._pad_to
        if missing == 0:
            return self._product(rows)
        return self._product(functional.pad(rows, (0, 0, 0, missing)))[:num_rows]


def find_row_plan(
    products: Sequence[tuple[PackedProduct, int]],
    dtype: torch.dtype,
    device: torch.device,
    candidates: Sequence[RowPlan] = CANDIDATE_PLANS,
) -> RowPlan:
    """The first of `candidates` under which each row's bits are the same in every probed company.

    `products`: each with its number of inputs. Probes `PROBE_ROWS` rows a call and several offsets of
    a row inside it, on the weights that will be used.
    """
    generator = torch.Generator().manual_seed(0)
    samples = []
    for product, inputs in products:
        rows = torch.randn((max(PROBE_ROWS), inputs), generator=generator).to(dtype).to(device)
        samples.append((product, rows))
    for plan in candidates[:-1]:
        if all(_holds(Linear(product, plan), rows) for product, rows in samples):
            return plan
    return candidates[-1]


def _holds(linear: Linear, rows: Tensor) -> bool:
    """Whether the first rows keep their bits in calls of all probed sizes, at all probed offsets."""
    alone = torch.cat([linear(rows[row : row + 1]) for row in range(_REFERENCE_ROWS)])
    for num_rows in PROBE_ROWS:
        for offset in _PROBE_OFFSETS:
            if offset >= num_rows:
                continue
            shifted = torch.cat((rows[num_rows - offset : num_rows], rows[: num_rows - offset]))
            count = min(_REFERENCE_ROWS, num_rows - offset)
            if not torch.equal(linear(shifted)[offset : offset + count], alone[:count]):
                return False
    return True
