"""Weights in 8 and 4 bits: near the plain product, and refused where the kernels cannot take them."""

import pytest
import torch

from core.drafter_settings import Quantisation
from core.errors import InvalidArgument
from engine.linear import pack
from engine.quantise import FEW_ROWS, fastest_quantisation, quantised_product


@pytest.mark.parametrize(("quantisation", "limit"), [("int8", 0.02), ("int4", 0.15)])
@pytest.mark.parametrize("rows", [1, 3, 8, 33])
def test_a_product_is_near_the_plain_one(quantisation: Quantisation, limit: float, rows: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(96, 128) * torch.rand(96, 1)
    values = torch.randn(rows, 128, dtype=torch.bfloat16)
    plain = values.float() @ weight.T
    found = quantised_product(weight.bfloat16(), quantisation)(values)
    assert found.dtype is torch.bfloat16
    assert found.shape == plain.shape
    assert float((found.float() - plain).norm() / plain.norm()) < limit


@pytest.mark.parametrize(
    ("quantisation", "outputs", "inputs"), [("int4", 10, 40), ("int4", 32, 40), ("int8", 64, 172)]
)
def test_a_matrix_that_the_kernels_do_not_take_is_refused(
    quantisation: Quantisation, outputs: int, inputs: int
) -> None:
    with pytest.raises(InvalidArgument, match=f"{outputs} x {inputs}"):
        quantised_product(torch.zeros(outputs, inputs), quantisation)


def test_zeros_stay_zero() -> None:
    for quantisation in ("int8", "int4"):
        product = quantised_product(torch.zeros(32, 64, dtype=torch.bfloat16), quantisation)
        assert float(product(torch.ones(2, 64, dtype=torch.bfloat16)).abs().max()) == 0.0


@pytest.mark.parametrize("quantisation", ["int8", "int4"])
def test_more_than_a_few_rows_take_the_weight_as_it_is(quantisation: Quantisation) -> None:
    torch.manual_seed(0)
    weight = torch.randn(64, 128).bfloat16()
    values = torch.randn(FEW_ROWS + 1, 128).bfloat16()
    product, plain, rounded = (
        pack(weight, quantisation),
        pack(weight),
        quantised_product(weight, quantisation),
    )
    assert torch.equal(product(values), plain(values))
    assert torch.equal(product(values[:FEW_ROWS]), rounded(values[:FEW_ROWS]))


def test_the_fastest_is_plain_for_a_matrix_that_int4_does_not_take() -> None:
    assert fastest_quantisation(torch.zeros(10, 40)) == "none"
    assert fastest_quantisation(torch.zeros(32, 64, device="meta", dtype=torch.bfloat16)) == "none"
    assert fastest_quantisation(torch.zeros(32, 64)) == "none"
    odd = torch.randn(10, 40).bfloat16()
    values = torch.randn(1, 40).bfloat16()
    assert torch.equal(pack(odd, None)(values), pack(odd)(values))
