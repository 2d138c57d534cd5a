"""The CPU's C++ kernel in its two ways, for machines that multiply 16-bit matrices fast and for others; its blocks."""

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
    with_gaps,
)
from tests.ops.linear.pretended_cpu import products_in_halves

HALVES = (torch.float16, torch.bfloat16)


@pytest.fixture(params=[0, 1], ids=["in fp32", "in halves"], autouse=True)
def forced(request):
    with products_in_halves(bool(request.param)):
        yield request.param


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_error_contract(activation, dtype, bias):
    name = "linear_act" if bias else "linear_act without bias"
    *leaves, dy = arguments(name, dtype, (130, 97, 75, 1))
    assert_contract(name, activation, leaves, dy)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_error_contract_of_dact(activation, dtype):
    assert_contract_of_dact(*before_a_layer(130, 75, 97, dtype), activation)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_the_ways_differ(forced, dtype):
    """In fp32 y is rounded once, so it is nearer to fp64's than where z is rounded too."""
    x, weight, bias, dy = layer(130, 97, 75, dtype)
    exact = results(linear_act, *(it.double() for it in (x, weight, bias, dy)), "gelu")[0]
    y = results(linear_act, x, weight, bias, dy, "gelu")[0]
    one_rounding = 0.3 * torch.finfo(dtype).eps  # eps / sqrt(12), as evenly spread errors have it
    assert (relative_error(y, exact) < one_rounding) == (forced == 0)


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(0, 5, 3), (4, 0, 3), (4, 5, 0)])
def test_empty(shape, weight_dtype):
    x, weight, bias, dy = layer(*shape, torch.bfloat16)
    weight = torch.nn.Parameter(weight)
    weight.grad_dtype = weight_dtype
    linear_act(x, weight, bias).backward(dy)
    assert weight.grad.dtype == weight_dtype
    assert not weight.grad.any()


@pytest.mark.parametrize("shape", list(itertools.product((0, 1, 3), repeat=3)), ids=str)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_gaps_however_small(shape, dtype):
    """Strides say nothing of a dimension of one element, or none."""
    x, weight, bias, dy = layer(*shape, dtype)
    want = results(linear_act, x, weight, bias, dy, "gelu")
    for change in (with_gaps, lambda it: with_gaps(it.t()).t()):
        got = results(linear_act, change(x), change(weight), with_gaps(bias), change(dy), "gelu")
        torch.testing.assert_close(got, want)


@pytest.mark.each_value_once
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
@pytest.mark.parametrize("activation", ["none", "gelu"])
def test_several_blocks(activation, dtype):
    """Outputs so many that a block is 32 rows."""
    arguments = layer(70, 3, 140_001, dtype)
    got = results(linear_act, *arguments, activation)
    with mpkernels.backend("reference"):
        want = results(linear_act, *arguments, activation)
    for mine, references in zip(got, want, strict=True):
        assert relative_error(mine, references) <= 8 * torch.finfo(dtype).eps  # of sums over 140,001


@pytest.mark.each_value_once
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
def test_several_blocks_of_dact(dtype):
    dy, weight, z = before_a_layer(70, 3, 140_001, dtype)
    arguments = dy, weight, z, "silu", torch.float32, True
    for mine, references in zip(_linear_dact(*arguments), _linear_dact.reference(*arguments), strict=True):
        assert relative_error(mine, references) <= 8 * torch.finfo(dtype).eps


def test_dact_takes_a_product_of_16_bits_where_those_are_fast(forced):
    """torch rounds it, and dz is rounded once more; h is rounded once however z was made."""
    dy, weight, z = before_a_layer(130, 75, 97, torch.bfloat16)
    dz, _, h = _linear_dact(dy, weight, z, "gelu", None, True)
    want, _ = torchs_dact(dy.double(), weight.double(), z.double(), "gelu")
    one_rounding = 0.3 * torch.finfo(torch.bfloat16).eps
    assert (relative_error(dz, want) < one_rounding) == (forced == 0)
    assert relative_error(h, torch.nn.functional.gelu(z.double())) < one_rounding


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_transposed_weights_and_inputs(dtype):
    x, weight, bias, dy = layer(33, 40, 24, dtype)
    want = results(linear_act, x, weight, bias, dy, "silu")
    got = results(
        linear_act, x.t().contiguous().t(), weight.t().contiguous().t(), bias, dy.t().contiguous().t(), "silu"
    )
    for mine, plain in zip(got, want, strict=True):
        assert relative_error(mine, plain) <= torch.finfo(dtype).eps / 2


def test_a_weight_gradient_beyond_fp16(forced):
    """In halves it is a sum of two fp16, the first of which is inf: not NaN, for what that inf leaves over is -inf."""
    dy, x = torch.full((2, 1), 200.0, dtype=torch.float16), torch.full((2, 1), -200.0, dtype=torch.float16)
    _, dweight, _ = _linear_act_backward(dy, x, None, dy.new_empty(0), "none", torch.float32, None)
    assert dweight.item() == (-float("inf") if forced else -80000.0)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_weight_gradient_in_fp32_has_more_than_16_bits(dtype):
    ones = torch.ones(2049, 1, dtype=dtype)
    _, dweight, _ = _linear_act_backward(ones, ones, None, ones.new_empty(0), "none", torch.float32, None)
    assert dweight.item() == 2049.0
