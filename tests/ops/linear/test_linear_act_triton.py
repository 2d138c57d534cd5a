"""Tests for Triton's kernels alone: edges of tiles, strides, the choice of a kernel, formulas."""

from functools import partial

import pytest
import torch

from mpkernels.ops.linear import linear_act_triton, tiling
from mpkernels.ops.linear.linear_act import _linear_act, _linear_act_backward
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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_are_exact_at_the_edges_of_tiles(dtype):
    for rows, features, outputs in ((63, 33, 65), (65, 32, 64), (128, 31, 129), (129, 48, 144), (144, 16, 16)):
        assert_exact(*matrices(rows, features, outputs, dtype))


def test_every_tile_is_computed_once():
    """There are more rows of tiles than a group has, and the last group is not full."""
    assert_exact(*matrices(64 * 9 + 1, 1, 64 * 2 + 1))


def test_a_lane_adds_up_few_rows(monkeypatch):
    monkeypatch.setattr(linear_act_triton, "PARTS", 1)
    dy = torch.ones(1000, 3, device=DEVICE)
    _, sums = linear_act_triton._dact(dy, dy.new_empty(0), "none", False, True)
    rows = linear_act_triton.MOST_ADDED * linear_act_triton.BLOCK["BLOCK_M"]
    assert sums[:, 0].tolist() == [rows] * (1000 // rows) + [1000 % rows]


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


@pytest.mark.parametrize("chip", tiling.TILES)
def test_tiles_are_chosen_by_dtype_and_sizes(chip):
    kinds = tiling.TILES[chip]

    def tile(rows, dtype, precision="ieee", features=32, outputs=16):
        x, weight, _, _ = matrices(rows, features, outputs, dtype)
        return tiling.tile(chip, x, weight, precision)

    assert tile(80, torch.bfloat16) == kinds["16 bits"]
    assert tile(64, torch.float16) == tile(80, torch.float16, outputs=1) == kinds["16 bits, few rows"]
    assert tile(80, torch.float32) == tile(80, torch.float32, features=33) == kinds["fp32"]
    assert tile(80, torch.float32, "tf32") == kinds["tf32"]
    for features in (31, 24):  # rows of 24 start at multiples of 8, which Triton doesn't know of
        assert tile(80, torch.bfloat16, features=features) == tiling.UNEVEN
    x, weight, _, _ = matrices(80, 32, 16)
    wide_x, wide_weight, _, _ = matrices(80, 40, 16)
    for operands in ((wide_x[:, :32], weight), (x, wide_weight[:, :32])):
        assert tiling.tile(chip, *operands, "ieee") == tiling.UNEVEN


def test_fp32_is_multiplied_in_tf32_only_where_torch_may(monkeypatch):
    precisions, choose = [], tiling.tile
    monkeypatch.setattr(tiling, "tile", lambda *it: precisions.append(it[-1]) or choose(*it))
    x, weight, bias, _ = matrices(3, 5, 7, torch.float32)
    try:
        for setting in ("ieee", "tf32", "none"):
            torch.backends.cuda.matmul.fp32_precision = setting
            _linear_act(x, weight, bias, "none", False)
    finally:
        torch.backends.cuda.matmul.fp32_precision = "none"
    assert precisions == ["ieee", "tf32", "ieee"]


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
    monkeypatch.setattr(linear_act_triton, "dact_kernel", None)
    monkeypatch.setattr(torch, "mm", None)
    nothing = x.new_empty(0)
    for result in _linear_act_backward(dy, None, None, dy, "gelu", None, None):
        assert result.shape == (0,)
    monkeypatch.undo()
    monkeypatch.setattr(linear_act_triton, "dact_kernel", None)
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
