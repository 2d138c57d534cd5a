"""linear_dact's product that cublasLt ends, under emulation: where it is taken, and what it is."""

import itertools
from functools import partial

import pytest
import torch

from mpkernels.ops import linear_dact
from mpkernels.ops.linear.activations import ACTIVATIONS
from tests.linear_cases import assert_contract_of_dact, before_a_layer, saved_of
from tests.ops.linear.test_cublas import beside_alignment, dact, every_second, transposed
from tests.ops.linear.test_cublaslt import HALVES, LAYOUTS, UNALIGNED, launches, notes

B16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SHAPES = pytest.mark.parametrize(
    "shape", [(16, 24, 32), (1, 8, 8), (3, 16, 8), (130, 264, 8), (7, 40, 72)], ids=str
)  # of dy's rows and columns, and weight's columns: rows of multiples of 16 bytes


@SHAPES
@HALVES
def test_error_contract(target, dtype, shape):
    assert_contract_of_dact(*before_a_layer(*shape, dtype, target.device), "gelu_tanh", with_dbias=False)


@SHAPES
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [B16, F16, F32], ids=str)
def test_one_product_where_it_serves(emulated, dtype, activation, shape, monkeypatch):
    dy, weight, z = before_a_layer(*shape, dtype)
    saved = saved_of(z, activation)
    for bias_dtype, wants_h in itertools.product((None, dtype, F32), (False, True)):
        makes_h = wants_h and ACTIVATIONS[activation].saves == "z"
        serves = activation == "gelu_tanh" and dtype != F32 and bias_dtype is None and not makes_h
        before, reasons = notes(monkeypatch)
        _, count = launches(partial(dact, wants_h=wants_h), dy, weight, saved, activation, bias_dtype)
        after = notes(monkeypatch)
        assert (count == 1) == serves
        assert after[0].get("linear_dact", 0) - before.get("linear_dact", 0) == serves
        assert after[1] == reasons


@SHAPES
@HALVES
def test_it_is_the_product_times_the_slope_at_z(emulated, dtype, shape):
    """As product and pass have it: each slope is made of less than 16 roundings of terms around 1, each dz rounded."""
    dy, weight, z = before_a_layer(*shape, dtype)
    z *= 2
    dz, dbias = dact(dy, weight, z, "gelu_tanh", None)
    other, _ = dact(dy, weight, z, "gelu_tanh", F32)
    assert (dz.dtype, dz.shape, dbias.shape) == (dtype, z.shape, (0,))
    limits = torch.finfo(dtype)
    slopes = 16 * torch.finfo(F32).eps * (dy.double() @ weight.double()).abs()
    roundings = 1.01 * limits.eps * other.double().abs() + limits.smallest_normal * limits.eps
    assert ((dz.double() - other.double()).abs() <= slopes + roundings).all()


@SHAPES
@HALVES
def test_layouts_change_no_bit(emulated, dtype, shape):
    """An algorithm for one distance between z's rows would be refused with another."""
    dy, weight, z = before_a_layer(*shape, dtype)
    wanted, otherwise = (dact(dy, weight, z, "gelu_tanh", bias_dtype)[0] for bias_dtype in (None, F32))
    served = 0
    for of_dy, of_weight, of_z in itertools.product(LAYOUTS, repeat=3):
        saved = of_z(z)
        (got, _), count = launches(dact, of_dy(dy), of_weight(weight), saved, "gelu_tanh", None)
        served += count == 1
        assert torch.equal(got, wanted if count == 1 else otherwise)
        assert torch.equal(saved, z)
    is_row, whole = shape[0] == 1, shape[0] % 8 == 0
    assert served == (4 if whole else 3 if is_row else 2) * len(LAYOUTS) * (3 if is_row else 2)


def test_what_does_not_fit_goes_the_other_way(emulated, monkeypatch):
    dy, weight, z = before_a_layer(16, 24, 32, B16)
    for why, arguments in {
        UNALIGNED: [
            (beside_alignment(dy), weight, z),
            (dy, beside_alignment(weight), z),
            (dy, weight, beside_alignment(z)),
            (dy, weight, torch.cat([z, z], 1)[:, 4:36]),
            (dy, weight, torch.cat([z, z[:, :4]], 1)[:, :-4]),
            before_a_layer(16, 33, 32, B16),
            before_a_layer(16, 24, 20, B16),
        ],
        "a row of saved is not contiguous, or overlaps another": [
            (dy, weight, transposed(z)),
            (dy, weight, every_second(z)),
            (dy, weight, z[:1].expand(z.shape)),
            (dy, weight, z.as_strided(z.shape, (8, 1))),
        ],
    }.items():
        for each in arguments:
            before = notes(monkeypatch)[1].get(why, 0)
            (dz, _), count = launches(dact, *each, "gelu_tanh", None)
            assert (count, notes(monkeypatch)[1][why]) == (2, before + 1)
            assert torch.equal(dz, dact(*(it.clone() for it in each), "gelu_tanh", F32)[0])
    before = notes(monkeypatch)
    empty, _ = dact(dy[:, :0], weight[:0], z, "gelu_tanh", None)
    assert torch.equal(empty, torch.zeros_like(z))
    assert notes(monkeypatch) == before  # cublasLt was not even asked


@HALVES
def test_nan_passes(target, dtype):
    dy, weight, z = before_a_layer(16, 24, 32, dtype, target.device)
    dy[3, 5] = z[7, 9] = torch.nan
    dz, _ = linear_dact(dy, weight, z, "gelu_tanh", None)
    assert dz[3].isnan().all()
    assert dz[7, 9].isnan()
    assert dz.isnan().sum() == 33


def test_overflow_becomes_inf(target):
    x = torch.full((8, 8), 300.0, dtype=F16, device=target.device)
    assert linear_dact(x, x, x, "gelu_tanh", None)[0].isinf().all()
