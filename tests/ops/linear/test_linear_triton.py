"""Tests for Triton's kernels alone: edges of tiles, copies, strides, formulas. The gate shows which tile is chosen."""

from functools import partial
from unittest.mock import MagicMock

import pytest
import torch

from mpkernels.ops.linear import linear_triton
from mpkernels.ops.linear.linear_act import _linear_act, _linear_act_backward
from mpkernels.ops.linear.linear_dact import _linear_dact
from mpkernels.ops.linear.linear_gated import _linear_dgated, _linear_gated
from mpkernels.ops.linear.linear_triton import LARGE, SMALL
from tests import linear_cases
from tests.linear_cases import TORCH, transposed
from tests.targets import CPU, CUDA, TARGETS

DEVICE = CUDA if torch.cuda.is_available() else CPU
DTYPES = torch.float16, torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def _triton():
    with TARGETS[f"{DEVICE.type}-triton"].active():
        yield


integers = partial(linear_cases.integers, device=DEVICE)


def assert_exact(x, weight, bias, dy, activation="relu2"):
    arguments = x, weight, bias, activation, True
    (y, z), (want, want_z) = _linear_act(*arguments), _linear_act.reference(*arguments)
    assert torch.equal(y, want)
    assert torch.equal(z, want_z)
    arguments = dy, x, weight, z, activation, torch.float32, torch.float32
    for got, want in zip(_linear_act_backward(*arguments), _linear_act_backward.reference(*arguments), strict=True):
        assert torch.equal(got, want)


def matrices(rows, features, outputs, dtype=torch.bfloat16):
    sizes = (rows, features), (outputs, features), (outputs,), (rows, outputs)
    return [integers(*shape, dtype=dtype, seed=i) for i, shape in enumerate(sizes)]


@pytest.fixture(params=[SMALL, LARGE], ids=["small", "large"])
def tile(request, monkeypatch):
    if DEVICE == CUDA and torch.cuda.get_device_capability()[0] not in (9, 10):
        pytest.skip("has a tile of its own")
    monkeypatch.setattr(linear_triton, "tile_for", lambda dtype: request.param)
    return request.param


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_results_are_exact_at_the_edges_of_tiles(tile, dtype):
    for rows, features, outputs in ((63, 33, 65), (65, 32, 64), (128, 31, 129), (129, 48, 144), (144, 16, 16)):
        assert_exact(*matrices(rows, features, outputs, dtype))


def test_every_tile_is_computed_once(tile):
    """There are more rows of tiles than a group has, and the last group is not full."""
    assert_exact(*matrices(tile["BLOCK_M"] * 9 + 1, 1, tile["BLOCK_N"] * 2 + 1))


def test_products_before_an_activation_and_gates_are_exact_in_each_tile(tile):
    """Each block of columns that is finished at once lies in one of a tile, and in two of them at its end."""
    rows, features, outputs = tile["BLOCK_M"] + 1, tile["BLOCK_K"] + 8, tile["BLOCK_N"] + 40
    x, weight, bias, dy = matrices(rows, features, outputs)
    up, z = weight.flip(0), integers(rows, 2 * outputs, seed=5)
    back, gates = integers(rows, features, seed=6), integers(features, outputs, seed=7)
    for op, arguments in (
        (_linear_act, (x, weight, bias, "relu", True)),  # saves no z
        (_linear_gated, (x, weight, up, bias, None, "relu", True)),
        (_linear_dact, (back, gates, z[:, :outputs], "relu2", torch.float32, True)),
        (_linear_dact, (back, gates, z[:, :outputs], "relu", torch.float32, False)),
        (_linear_dgated, (back, gates, z, "relu", True)),
        (_linear_dgated, (dy, None, z, "relu2", True)),
    ):
        torch.testing.assert_close(op(*arguments), op.reference(*arguments), rtol=0, atol=0)


def test_results_are_whole_tensors():
    """Autograd refuses to change views in place."""
    for columns in (16, 17):
        x, weight, bias, _ = matrices(9, 8, columns)
        assert all(it._base is None and it.is_contiguous() for it in _linear_act(x, weight, bias, "gelu", True))
        assert all(
            it._base is None and it.is_contiguous() for it in _linear_gated(x, weight, weight, None, None, "silu", True)
        )


def test_only_matrices_that_tma_cannot_take_are_copied():
    wide = torch.ones(9, 40, dtype=torch.bfloat16)
    for matrix in (wide, wide[1:, :32], wide[:, 8:], wide[:, :17], wide[:1, :3]):
        assert linear_triton._blocks(matrix, 16, 16).base is matrix
    for matrix in (wide[:, 1:33], wide.t(), wide[:, ::2], wide[:1].expand(9, 40), torch.ones(4, 9, dtype=wide.dtype)):
        taken = linear_triton._blocks(matrix, 16, 16)
        assert taken.base is not matrix
        assert torch.equal(taken.base, matrix)
        assert (taken.strides[0] % 8, taken.strides[1], taken.base.data_ptr() % 16) == (0, 1, 0)


def test_fp32_is_multiplied_in_tf32_only_where_torch_may(monkeypatch):
    kernel = MagicMock()
    monkeypatch.setattr(linear_triton, "linear_act_kernel", kernel)
    x, weight, bias, _ = matrices(3, 5, 7, torch.float32)
    try:
        for setting in ("ieee", "tf32", "none"):
            torch.backends.cuda.matmul.fp32_precision = setting
            _linear_act(x, weight, bias, "none", False)
    finally:
        torch.backends.cuda.matmul.fp32_precision = "none"
    launches = kernel.__getitem__.return_value.call_args_list
    assert [launch.kwargs["PRECISION"] for launch in launches] == ["ieee", "tf32", "ieee"]


@pytest.mark.parametrize("rows", [64, 65, 8193])
def test_bias_gradients_are_exact_sums_of_many_parts(rows):
    dy, saved = integers(rows, 3, dtype=torch.float32), integers(rows, 3, dtype=torch.float32, seed=1)
    _, _, dbias = _linear_act_backward(dy, None, None, saved, "relu2", None, torch.float32)
    assert torch.equal(dbias, torch.where(saved > 0, 2 * saved * dy, 0).sum(0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_are_exact_with_any_strides(dtype):
    x, weight, bias, dy = matrices(48, 32, 80, dtype)
    assert_exact(transposed(x), weight, bias, dy)
    assert_exact(x, transposed(weight), bias, transposed(dy))
    wide_x, wide_weight, wide_bias, wide_dy = matrices(96, 64, 160, dtype)
    assert_exact(wide_x[::2, 1::2], wide_weight[::2, 1::2], wide_bias[::2], wide_dy[::2, 1::2])
    assert_exact(x[:1].expand(48, 32), weight[:, :1].expand(80, 32), bias[:1].expand(80), dy[0, 0].expand(48, 80))
    assert_exact(x.flatten()[1:-31].view(47, 32), weight, bias, dy[1:])


@pytest.mark.parametrize("activation", ["relu", "relu2"])
def test_results_are_exact_with_any_strides_of_saved_tensors(activation):
    dy, saved = integers(33, 70), integers(70, 33)
    for each in (saved.t(), saved[0, :, None].expand(33, 70), integers(66, 140)[::2, ::2]):
        arguments = dy, None, dy.t(), each, activation, None, torch.float32
        for got, want in zip(_linear_act_backward(*arguments), _linear_act_backward.reference(*arguments), strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu", "sigmoid", "tanh"])
def test_formulas_lose_nothing_in_the_tails(activation):
    """The argument of exp, which grows up to a cube of x, is rounded, and the rounding becomes a factor. The rest is
    roundings and 2 ulp of exp. test_activation.py tests the slopes."""
    x = torch.cat([torch.linspace(-12, 12, 4097), torch.logspace(-20, 0, 201), -torch.logspace(-20, 0, 201)])
    x, one = x.to(DEVICE).unsqueeze(1), torch.ones(1, 1, device=DEVICE)
    y, _ = _linear_act(x, one, None, activation, False)
    eps, wide = torch.finfo(torch.float32).eps, x.double()
    want = wide / 2 * torch.special.erfc(-wide * 0.5**0.5) if activation == "gelu" else TORCH[activation](wide)
    if activation == "gelu_tanh":
        want = wide * torch.sigmoid(1.5957691216057308 * (wide + 0.044715 * wide**3))
    size = wide.abs()
    bound = (8 + 2 * size**2 + size**3 / 8) * eps * want.abs() + 16 * torch.finfo(torch.float32).tiny
    assert ((y - want).abs() <= bound).all()


def test_backward_computes_nothing_that_is_not_wanted(monkeypatch):
    x, weight, _, dy = matrices(5, 7, 9)
    monkeypatch.setattr(linear_triton, "linear_dact_kernel", None)
    monkeypatch.setattr(torch, "mm", None)
    nothing = x.new_empty(0)
    for result in _linear_act_backward(dy, None, None, dy, "gelu", None, None):
        assert result.shape == (0,)
    monkeypatch.undo()
    monkeypatch.setattr(linear_triton, "linear_dact_kernel", None)
    dx, _, _ = _linear_act_backward(dy, None, weight, nothing, "none", None, None)  # without an activation dz is dy
    assert torch.equal(dx, dy @ weight)


def test_autocast_changes_nothing_in_the_op():
    x, weight, _, dy = matrices(5, 7, 9)
    arguments = dy, x, weight, dy, "relu2", torch.float32, torch.float32
    with torch.autocast(DEVICE.type, torch.float16):
        dx, dweight, dbias = _linear_act_backward(*arguments)
    assert (dx.dtype, dweight.dtype, dbias.dtype) == (torch.bfloat16, torch.float32, torch.float32)


def test_fp64_is_refused():
    x, weight, _, dy = matrices(2, 3, 4, torch.float64)
    with pytest.raises(TypeError, match=r"^linear_act: the Triton kernel takes .*, got torch.float64$"):
        _linear_act(x, weight, None, "none", True)
    with pytest.raises(TypeError, match=r"^linear_act_backward: the Triton kernel takes "):
        _linear_act_backward(dy, x, weight, dy, "relu", None, None)
