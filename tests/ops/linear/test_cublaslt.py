"""linear_act's products that cublasLt ends, under emulation: which they are, what they are, and what else happens."""

import itertools

import pytest
import torch

from mpkernels import _extension
from mpkernels.functional import linear_act
from mpkernels.ops.linear.activations import ACTIVATIONS
from tests.linear_cases import assert_contract, layer
from tests.ops.linear.test_cublas import beside_alignment, every_second, forward, transposed
from tests.targets import emulated_variable, emulation_library

B16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
HALVES = pytest.mark.parametrize("dtype", [B16, F16], ids=str)
ENDED = ("none", "gelu_tanh")
SHAPES = [(16, 24, 32), (1, 8, 8), (3, 16, 8), (130, 8, 264), (7, 40, 72)]  # rows of multiples of 16 bytes


def notes(monkeypatch):
    monkeypatch.setattr(_extension, "LIBRARY", emulation_library())
    return _extension.cublaslt_notes()


def launches(function, *arguments):
    counter = emulated_variable("emulation_launches")
    before = counter.value
    return function(*arguments), counter.value - before


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("activation", ENDED)
@HALVES
def test_error_contract(target, dtype, activation, bias, shape):
    assert_contract(linear_act, *layer(*shape, dtype, target.device, bias=bias), activation)


@pytest.mark.parametrize("save", [True, False])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [B16, F16, F32], ids=str)
def test_one_product_where_it_serves(emulated, dtype, activation, bias, save):
    for shape in SHAPES:
        x, weight, b, _ = layer(*shape, dtype, bias=bias)
        (y, z), count = launches(forward, x, weight, b, activation, save)
        is_bare = activation == "none" and not bias
        assert count == (1 if is_bare or (activation in ENDED and dtype != F32) else 2)
        assert z.shape == (y.shape if save and ACTIVATIONS[activation].saves == "z" else (0,))


def with_a_gap(matrix):
    return torch.cat([matrix, matrix[:, :1].repeat(1, 8)], 1)[:, :-8]


LAYOUTS = (torch.clone, transposed, with_a_gap, lambda it: with_a_gap(it.t()).t())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("activation", ENDED)
@HALVES
def test_layouts_change_no_bit(emulated, dtype, activation, shape):
    x, weight, bias, _ = layer(*shape, dtype)
    wanted = forward(x, weight, bias, activation, True)
    served = 0
    for of_x, of_weight in itertools.product(LAYOUTS, repeat=2):
        got, count = launches(forward, of_x(x), of_weight(weight), bias, activation, True)
        served += count == 1
        assert torch.equal(got[1], wanted[1])
        assert torch.equal(got[0], wanted[0]) or (count == 2 and activation == "gelu_tanh")
    fit = 4 if shape[0] % 8 == 0 else 3 if shape[0] == 1 else 2  # of x's, whose columns are so long, or with a gap
    assert served == fit * len(LAYOUTS)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@HALVES
def test_z_is_that_of_product_and_pass(emulated, dtype, bias, shape, monkeypatch):
    """Bit for bit, as long as sums run in one order: bias comes before the only rounding, to z as to y."""
    x, weight, b, _ = layer(*shape, dtype, bias=bias)
    y, z = forward(x, weight, b, "gelu_tanh", True)
    (other, wanted), count = launches(forward, beside_alignment(x), weight, b, "gelu_tanh", True)
    assert (count, notes(monkeypatch)[1][UNALIGNED] > 0) == (2, True)
    assert torch.equal(z, wanted)
    assert torch.equal(y, forward(x, weight, b, "gelu_tanh", False)[0])
    torch.testing.assert_close(y, other, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    assert torch.equal(forward(x, weight, b, "none", True)[0], wanted)


UNALIGNED = "a row of an argument or of a result does not begin at a multiple of 16 bytes"


@pytest.mark.parametrize("activation", ENDED)
def test_what_does_not_fit_goes_the_other_way(emulated, activation, monkeypatch):
    x, weight, bias, _ = layer(16, 24, 32, B16)
    beside = beside_alignment(bias.unsqueeze(0))[0]
    for why, arguments in {
        UNALIGNED: [
            (beside_alignment(x), weight, bias),
            (x, beside_alignment(weight), bias),
            (x, weight, beside),
            layer(16, 24, 33, B16)[:3],
            layer(16, 20, 32, B16)[:3],
        ],
        "bias is not contiguous": [(x, weight, every_second(bias.unsqueeze(0))[0]), (x, weight, bias[:1].expand(32))],
    }.items():
        for each in arguments:
            before = notes(monkeypatch)[1].get(why, 0)
            (y, z), count = launches(forward, *each, activation, True)
            assert (count, notes(monkeypatch)[1][why]) == (2, before + 1)
            wanted = forward(*(it.clone() for it in each), activation, True)
            torch.testing.assert_close((y, z), wanted, rtol=2 * torch.finfo(B16).eps, atol=1e-6)
    empty = forward(x[:, :0], weight[:, :0], bias, "none", True)[0]
    assert torch.equal(empty, bias.expand(16, 32))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@HALVES
def test_nan_passes(target, dtype, activation):
    """cublasLt's own relu would make a 0 of it."""
    x, weight, bias, _ = layer(16, 24, 32, dtype, target.device)
    x[3, 5] = torch.nan
    bias[7] = torch.nan
    y = linear_act(x, weight, bias, activation)
    assert y[3].isnan().all()
    assert y[:, 7].isnan().all()
    assert y.isnan().sum() == 32 + 15


def test_overflow_becomes_inf(target):
    x = torch.full((8, 8), 300.0, dtype=F16, device=target.device)
    for activation in ENDED:
        assert linear_act(x, x, x[0], activation).isinf().all()
