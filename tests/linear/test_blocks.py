"""linear_act, gated_linear, mlp and gated_mlp compute what torch's functions do."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mpkernels.ops.linear.activations import ACTIVATIONS
from tests.block_cases import BLOCKS, MLPS, arguments, assert_contract, results
from tests.linear_cases import relative_error, transposed

B16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
DTYPES = [F16, B16, F32]
EVERY = pytest.mark.parametrize("name", BLOCKS)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@EVERY
def test_errors_stay_within_the_contract(target, name, activation, dtype):
    sizes = (65, 24, 33, 21) if target.is_interpreted else (130, 75, 97, 66)
    *leaves, dy = arguments(name, dtype, sizes, target.device)
    assert_contract(name, activation, leaves, dy)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from([*BLOCKS]),
    sizes=st.tuples(*[st.integers(1, 150)] * 4),
    dtype=st.sampled_from(DTYPES),
    activation=st.sampled_from([*ACTIVATIONS]),
    seed=st.integers(0, 1000),
)
def test_errors_stay_within_the_contract_at_any_shape(target, name, sizes, dtype, activation, seed):
    if target.is_interpreted:
        sizes = [1 + size % 40 for size in sizes]
    *leaves, dy = arguments(name, dtype, sizes, target.device, seed)
    assert_contract(name, activation, leaves, dy)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MLPS)
def test_recomputing_changes_no_bit(target, name, dtype):
    *leaves, dy = arguments(name, dtype, device=target.device)
    got, want = (results(BLOCKS[name].ours, "gelu", leaves, dy, recompute=again) for again in (True, False))
    assert all(map(torch.equal, got, want))


def test_the_backward_makes_no_pass_for_h(target):
    """The kernel that reads z for the slope also makes h, the input of the last layer."""
    *leaves, dy = arguments("mlp", B16, device=target.device)
    y = BLOCKS["mlp"].ours("gelu", *(it.requires_grad_() for it in leaves))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        y.backward(dy)
    assert "aten::gelu" not in {event.key for event in profile.key_averages()}


@pytest.mark.parametrize("rows", [(2, 3), (2, 1, 3), (0, 3), ()], ids=str)
@EVERY
def test_x_may_have_any_number_of_dimensions(target, name, rows):
    x, *parameters, dy = arguments(name, F32, device=target.device)
    x, dy = (it[:1].expand(*rows, -1) if rows else it[0] for it in (x, dy))
    got, want = (results(f, "silu", [x, *parameters], dy) for f in BLOCKS[name][:2])
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("sizes", [(0, 3, 5, 4), (4, 0, 5, 3), (4, 3, 0, 5), (4, 3, 5, 0)], ids=str)
@EVERY
def test_tensors_may_be_empty_in_any_dimension(target, name, sizes):
    *leaves, dy = arguments(name, B16, sizes, target.device)
    got, want = (results(f, "silu", leaves, dy) for f in BLOCKS[name][:2])
    for mine, torchs_own in zip(got, want, strict=True):
        assert mine.shape == torchs_own.shape
        assert relative_error(mine, torchs_own) <= 4 * torch.finfo(B16).eps


@pytest.mark.parametrize("dtype", [B16, F32], ids=str)
@EVERY
def test_weights_may_be_transposed(target, name, dtype):
    x, *parameters, dy = arguments(name, dtype, (16, 32, 48, 24), target.device)
    strange = [transposed(it) if it.dim() == 2 else it for it in parameters]
    got, want = (results(BLOCKS[name].ours, "silu", [x, *those], dy) for those in (strange, parameters))
    for mine, plain in zip(got, want, strict=True):
        assert relative_error(mine, plain) <= 2 * torch.finfo(dtype).eps


@EVERY
def test_relus_slope_is_0_at_0(target, name):
    x, *parameters, dy = arguments(name, F32, device=target.device)
    got, want = (results(f, "relu", [torch.zeros_like(x), *parameters], dy) for f in BLOCKS[name][:2])
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@EVERY
def test_an_inf_or_nan_reaches_its_row_and_no_other(target, name, dtype, value):
    x, *parameters, dy = arguments(name, dtype, device=target.device)
    x[1, 2] = value
    for activation in ("relu", "silu"):
        y, dx, *_ = results(BLOCKS[name].ours, activation, [x, *parameters], dy)
        assert not y[1].isfinite().all()
        assert y[[0, 2, 3, 4, 5]].isfinite().all()
        assert dx[[0, 2, 3, 4, 5]].isfinite().all()
        if value != value:
            assert y[1].isnan().any()
            assert dx[1].isnan().any() or activation == "relu"  # relu's slope at NaN is 1, as torch's


@pytest.mark.parametrize("dtype", [F16, B16], ids=str)
@EVERY
def test_autocast_gives_torchs_dtypes_and_unrounded_weight_gradients(target, name, dtype):
    """Results have torch's dtypes, and weight gradients are not rounded to 16 bits."""
    *leaves, dy = arguments(name, F32, (65, 8, 10, 7), target.device)
    with torch.autocast(target.device.type, dtype=dtype):
        got, want = (results(f, "silu", leaves, dy.to(dtype)) for f in BLOCKS[name][:2])
    exact = results(BLOCKS[name].torchs, "silu", [it.double().cpu() for it in leaves], dy.double().cpu())
    for mine, torchs_own, oracle in zip(got, want, exact, strict=True):
        assert mine.dtype == torchs_own.dtype
        assert relative_error(mine, oracle) <= 4 * torch.finfo(dtype).eps
    assert not torch.equal(got[2], got[2].to(dtype).float())
