"""The CPU's C++ kernel, as it runs on CPUs that multiply 16-bit matrices fast and on others; its blocks of rows."""

import itertools

import pytest
import torch

import mpkernels
from mpkernels.functional import linear_act
from mpkernels.ops.linear.activations import ACTIVATIONS
from mpkernels.ops.linear.linear_act import _linear_act_backward
from mpkernels.ops.linear.linear_dact import _linear_dact
from tests.block_cases import arguments, assert_contract
from tests.linear_cases import (
    assert_contract_of_dact,
    before_a_layer,
    layer,
    relative_error,
    results,
    torchs_dact,
    transposed,
    with_gaps,
)
from tests.ops.linear.pretended_cpu import products_in_halves

HALVES = (torch.float16, torch.bfloat16)


@pytest.fixture(params=[False, True], ids=["in fp32", "in halves"], autouse=True)
def in_halves(request):
    with products_in_halves(request.param):
        yield request.param


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_errors_stay_within_the_contract(activation, dtype, bias):
    name = "linear_act" if bias else "linear_act without bias"
    *leaves, dy = arguments(name, dtype, (130, 97, 75, 1))
    assert_contract(name, activation, leaves, dy)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_errors_of_dact_stay_within_the_contract(activation, dtype):
    assert_contract_of_dact(*before_a_layer(130, 75, 97, dtype), activation)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_in_halves_z_is_rounded_too(in_halves, dtype):
    """In fp32 only y is rounded, so its error is smaller."""
    x, weight, bias, dy = layer(130, 97, 75, dtype)
    exact = results(linear_act, *(it.double() for it in (x, weight, bias, dy)), "gelu")[0]
    y = results(linear_act, x, weight, bias, dy, "gelu")[0]
    one_rounding = 0.3 * torch.finfo(dtype).eps  # evenly spread errors are eps / sqrt(12)
    assert (relative_error(y, exact) < one_rounding) == (not in_halves)


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(0, 5, 3), (4, 0, 3), (4, 5, 0)])
def test_the_weight_gradient_of_an_empty_product_is_zeros(shape, weight_dtype):
    x, weight, bias, dy = layer(*shape, torch.bfloat16)
    weight = torch.nn.Parameter(weight)
    weight.grad_dtype = weight_dtype
    linear_act(x, weight, bias).backward(dy)
    assert weight.grad.dtype == weight_dtype
    assert not weight.grad.any()


@pytest.mark.parametrize("shape", list(itertools.product((0, 1, 3), repeat=3)), ids=str)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_gaps_in_memory_change_no_result(shape, dtype):
    """The stride of a dimension with one element, or none, means nothing: a kernel must not go by it."""
    x, weight, bias, dy = layer(*shape, dtype)
    want = results(linear_act, x, weight, bias, dy, "gelu")
    for change in (with_gaps, lambda it: with_gaps(it.t()).t()):
        got = results(linear_act, change(x), change(weight), with_gaps(bias), change(dy), "gelu")
        torch.testing.assert_close(got, want)


@pytest.mark.each_value_once
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
@pytest.mark.parametrize("activation", ["none", "gelu"])
def test_several_blocks_of_rows_give_the_references_result(activation, dtype):
    """With so many outputs, a block has 32 rows."""
    arguments = layer(70, 3, 140_001, dtype)
    got = results(linear_act, *arguments, activation)
    with mpkernels.backend("reference"):
        want = results(linear_act, *arguments, activation)
    for mine, references in zip(got, want, strict=True):
        assert relative_error(mine, references) <= 8 * torch.finfo(dtype).eps  # sums over 140,001 outputs


@pytest.mark.each_value_once
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
def test_several_blocks_of_rows_give_the_references_result_in_dact(dtype):
    dy, weight, z = before_a_layer(70, 3, 140_001, dtype)
    arguments = dy, weight, z, "silu", torch.float32, True
    for mine, references in zip(_linear_dact(*arguments), _linear_dact.reference(*arguments), strict=True):
        assert relative_error(mine, references) <= 8 * torch.finfo(dtype).eps


def test_in_halves_the_product_in_dact_is_rounded_too(in_halves):
    """torch rounds the product, and the kernel dz. h is rounded once in both ways."""
    dy, weight, z = before_a_layer(130, 75, 97, torch.bfloat16)
    dz, _, h = _linear_dact(dy, weight, z, "gelu", None, True)
    want, _ = torchs_dact(dy.double(), weight.double(), z.double(), "gelu")
    one_rounding = 0.3 * torch.finfo(torch.bfloat16).eps
    assert (relative_error(dz, want) < one_rounding) == (not in_halves)
    assert relative_error(h, torch.nn.functional.gelu(z.double())) < one_rounding


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_weights_and_inputs_may_be_transposed(dtype):
    x, weight, bias, dy = layer(33, 40, 24, dtype)
    want = results(linear_act, x, weight, bias, dy, "silu")
    got = results(linear_act, transposed(x), transposed(weight), bias, transposed(dy), "silu")
    for mine, plain in zip(got, want, strict=True):
        assert relative_error(mine, plain) <= torch.finfo(dtype).eps / 2


def test_a_weight_gradient_beyond_fp16_is_no_nan(in_halves):
    """In halves the gradient is a sum of two fp16 numbers. Here the first is -inf, and the sum must be -inf, too."""
    dy, x = torch.full((2, 1), 200.0, dtype=torch.float16), torch.full((2, 1), -200.0, dtype=torch.float16)
    _, dweight, _ = _linear_act_backward(dy, x, None, dy.new_empty(0), "none", torch.float32, None)
    assert dweight.item() == (-float("inf") if in_halves else -80000.0)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_weight_gradient_in_fp32_has_more_than_16_bits(dtype):
    ones = torch.ones(2049, 1, dtype=dtype)
    _, dweight, _ = _linear_act_backward(ones, ones, None, ones.new_empty(0), "none", torch.float32, None)
    assert dweight.item() == 2049.0
