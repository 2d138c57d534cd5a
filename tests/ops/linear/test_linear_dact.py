"""linear_dact: every kernel against fp64 in its error, layouts, sizes, and numbers that are not finite."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mpkernels.ops import linear_dact
from mpkernels.ops.linear.activations import ACTIVATIONS
from mpkernels.ops.linear.linear_act import _linear_act
from mpkernels.ops.linear.linear_dact import _linear_dact
from tests.linear_cases import (
    assert_contract_of_dact,
    before_a_layer,
    integers,
    relative_error,
    saved_of,
    torchs_dact,
    transposed,
)
from tests.ops.linear.test_linear_act import DTYPES, HALVES, INF, NAN, kinds, specials

B16, F32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_errors_stay_within_the_contract(target, activation, dtype):
    sizes = (33, 24, 40) if target.is_interpreted else (130, 75, 97)
    assert_contract_of_dact(*before_a_layer(*sizes, dtype, target.device), activation)


def test_fp64_is_computed_in_fp64(target):
    dy, weight, z = before_a_layer(9, 7, 5, torch.float64, target.device)
    got = linear_dact(dy, weight, z, "silu", torch.float64)
    torch.testing.assert_close(got, torchs_dact(dy, weight, z, "silu"), rtol=1e-12, atol=1e-12)


def assert_exact(dy, weight, saved, activation="relu2"):
    for bias_dtype, wants_h in ((dy.dtype, True), (F32, False), (None, True)):
        arguments = dy, weight, saved, activation, bias_dtype, wants_h
        for got, want in zip(_linear_dact(*arguments), _linear_dact.reference(*arguments), strict=True):
            assert got.is_contiguous()
            torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_are_exact_at_the_edges_of_tiles(target, dtype):
    for rows, outputs, columns in ((63, 33, 65), (65, 32, 64), (129, 48, 144), (64 * 9 + 1, 1, 129), (1, 3, 1)):
        shapes = (rows, outputs), (outputs, columns), (rows, columns)
        dy, weight, saved = (integers(*it, dtype=dtype, device=target.device) for it in shapes)
        assert_exact(dy, weight, saved)
        assert_exact(saved.flip(0), None, saved)  # dy is the gradient of what the activation returned


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_are_exact_with_any_strides(target, dtype):
    wide = [integers(*it, dtype=dtype, device=target.device, seed=1) for it in ((67, 65), (65, 97), (67, 97))]
    plain = dy, weight, saved = [it[: it.shape[0] // 2, : it.shape[1] // 2].contiguous() for it in wide]
    layouts = [
        [it.t().contiguous().t() for it in plain],
        [it[1::2, 1::2] for it in wide],
        [it[1 : 1 + it.shape[0] // 2, 1 : 1 + it.shape[1] // 2] for it in wide],
        [it[:1].expand(it.shape) for it in plain],
        [it[0, 0].expand(it.shape) for it in plain],
    ]
    for strange_dy, strange_weight, strange_saved in layouts:
        assert_exact(strange_dy, weight, saved)
        assert_exact(dy, strange_weight, saved, "relu")
        assert_exact(dy, weight, strange_saved)
        assert_exact(strange_dy, strange_weight, dy.new_empty(0), "none")
        assert_exact(strange_saved, None, saved)
        assert_exact(saved, None, strange_saved, "relu")


@pytest.mark.parametrize("shape", [(0, 5, 3), (4, 0, 3), (4, 5, 0), (0, 0, 0)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ["none", "relu", "relu2"])
def test_tensors_may_be_empty_in_any_dimension(target, shape, dtype, activation):
    *operands, z = before_a_layer(*shape, dtype, target.device)
    assert_exact(*operands, saved_of(z, activation), activation)
    z = z.round()
    assert_exact(z, None, saved_of(z, activation), activation)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_infs_and_nans_come_out_as_in_fp64(target, activation, dtype):
    z, one = specials(dtype).unsqueeze(1), torch.ones(1, 1, dtype=dtype)
    exact = activation in ("none", "relu", "relu2")  # in others inf meets a slope that is 0 only once it is rounded
    for value in (1.0, NAN, *[INF, -INF] * exact):
        dy = torch.full_like(z, value)
        want, _ = torchs_dact(dy.double(), one.double(), z.double(), activation)
        arguments = (it.to(target.device) for it in (dy, one, saved_of(z, activation)))
        dz, dbias = (it.cpu() for it in linear_dact(*arguments, activation, F32))
        assert torch.equal(kinds(dz), kinds(want.to(dtype)))
        assert torch.equal(kinds(dbias), kinds(want.to(F32).sum(0)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_h_is_the_forwards_result_for_the_same_z(target, activation, dtype):
    """The forward multiplies by 1 here, so its product is exact, even if it isn't finite."""
    values = specials(dtype)
    z = torch.cat((values, torch.linspace(-8, 8, 400 - len(values)).to(dtype))).unsqueeze(1).to(target.device)
    one = torch.ones(1, 1, dtype=dtype, device=target.device)
    want, _ = _linear_act(z, one, None, activation, False)
    for columns in (1, 25, 40):  # no pack, packs and a rest, packs alone
        saved = saved_of(z.view(-1, columns), activation)
        dy, weight = one.expand(400 // columns, 1), one.expand(1, columns)
        for layout in (saved, transposed(saved)) if saved.dim() == 2 else (saved,):
            h = _linear_dact(dy, weight, layout, activation, None, True)[2]
            assert h.dtype == dtype
            if ACTIVATIONS[activation].saves != "z":
                assert h.shape == (0,)
                continue
            assert h.is_contiguous()
            torch.testing.assert_close(h, want.view(-1, columns), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", [name for name, it in ACTIVATIONS.items() if it.saves == "z"])
def test_asking_for_h_changes_no_bit_of_the_other_results(target, activation, dtype):
    """Sums in Triton are an exception: its tiles are narrower with h, so it may add in another order."""
    dy, weight = (integers(*it, dtype=dtype, device=target.device) for it in ((70, 33), (33, 40)))
    z = before_a_layer(70, 33, 40, dtype, target.device)[2]
    with_h, without = (_linear_dact(dy, weight, z, activation, F32, wants_h) for wants_h in (True, False))
    assert [it.shape for it in with_h] == [(70, 40), (40,), (70, 40)]
    assert without[2].shape == (0,)
    assert torch.equal(with_h[0], without[0])
    assert torch.equal(with_h[1], without[1]) or target.kernel == "triton"


def test_rows_beyond_the_last_one_add_nothing(target):
    """A tile computes rows beyond the last one, too. There, 0 times inf must not reach the sums."""
    weight = torch.tensor([[INF, 1.0]], device=target.device)
    dz, dbias = linear_dact(weight.new_ones(3, 1), weight, weight.new_empty(0), "none", F32)
    assert dz.tolist() == [[INF, 1.0]] * 3
    assert dbias.tolist() == [INF, 3.0]


def test_overflow_becomes_inf(target):
    x = torch.full((3, 1), 300.0, dtype=torch.float16, device=target.device)
    assert all(it.isinf().all() for it in linear_dact(x, x[:1], x, "relu2", torch.float16))


def test_results_repeat_to_the_last_bit(target):
    arguments = *before_a_layer(70, 33, 40, B16, target.device), "gelu", F32
    assert all(map(torch.equal, linear_dact(*arguments), linear_dact(*arguments)))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_bias_gradients_are_sums_of_dz_before_it_is_rounded(target, dtype):
    """The product is exact, the slope takes less than 16 roundings to fp32, the sum of 64 rows no more."""
    dy, weight = (integers(*it, dtype=dtype) for it in ((64, 16), (16, 24)))
    z = torch.linspace(-3, 3, 64 * 24).view(64, 24).to(dtype)
    exact, _ = torchs_dact(dy.double(), weight.double(), z.double(), "silu")
    dz, dbias = (it.cpu() for it in linear_dact(*(it.to(target.device) for it in (dy, weight, z)), "silu", F32))
    assert ((dbias - exact.sum(0)).abs() <= 32 * torch.finfo(F32).eps / 2 * exact.abs().sum(0)).all()
    assert relative_error(dz, exact) < 0.3 * torch.finfo(dtype).eps  # rounded once: eps / sqrt(12)


def test_autocast_changes_nothing_in_the_op(target):
    arguments = *before_a_layer(5, 7, 9, F32, target.device), "gelu", F32
    want = linear_dact(*arguments)
    with torch.autocast(target.device.type, B16):
        assert all(map(torch.equal, linear_dact(*arguments), want))


def test_the_counted_flops_are_the_products():
    with FlopCounterMode(display=False) as counter:
        linear_dact(*before_a_layer(5, 7, 9, F32), "gelu", None)
    assert counter.get_total_flops() == 2 * 5 * 7 * 9
