"""linear_act in Triton: a product whose bias and activation never leave registers; and its backward, where one pass
over dy makes dz and the sums for the bias, and torch multiplies the matrices."""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from mpkernels.ops._autocast import without_autocast
from mpkernels.ops._registry import implement
from mpkernels.ops.linear import tiling
from mpkernels.ops.linear.activations import ACTIVATIONS
from mpkernels.ops.linear.activations_kernel import activate, activate_backward
from mpkernels.ops.linear.linear_act import _linear_act, _linear_act_backward
from mpkernels.ops.linear.product_kernel import add_bias, chip, multiply, precision, refuse_fp64, tile_of

MOST_ADDED = 8  # numbers added one by one in fp32: 8 equal ones are off by up to 1.3 eps, 16 by 2.5
PARTS = 128  # partial sums for the bias: enough programs for any chip, and little to add up in the end
PART_ROWS = 64
BLOCK = {"BLOCK_M": 16, "BLOCK_N": 128}


@triton.jit
def linear_act_kernel(
    x, weight, bias, y, z, M, N, K, x_row, x_column, weight_row, weight_column,
    ACTIVATION: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tile_m, tile_n = tile_of(tl.program_id(0), M, N, BLOCK_M, BLOCK_N)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N).to(tl.int64)
    total = multiply(
        x, weight, rows, columns, M, N, K, x_row, x_column, weight_column, weight_row, PRECISION, BLOCK_K
    )  # fmt: skip
    total = add_bias(total, bias, columns, N)
    at = rows[:, None] * N + columns[None, :]
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    if z is not None:
        tl.store(z + at, total.to(z.dtype.element_ty), mask=inside)
    tl.store(y + at, activate(total, ACTIVATION).to(y.dtype.element_ty), mask=inside)


@triton.jit
def dact_kernel(
    dy, saved, dz, sums, M, N, dy_row, dy_column, saved_row, saved_column, part_rows,
    ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Make ``part_rows`` rows of some columns of dz, and their sums."""
    part = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for begin in range(0, part_rows, BLOCK_M):
        rows = part * part_rows + begin + tl.arange(0, BLOCK_M)
        inside = (rows < M)[:, None] & (columns < N)[None, :]
        value = tl.load(dy + rows[:, None] * dy_row + columns[None, :] * dy_column, mask=inside, other=0).to(tl.float32)
        if saved is not None:
            at = rows[:, None] * saved_row + columns[None, :] * saved_column
            value = activate_backward(value, tl.load(saved + at, mask=inside, other=0).to(tl.float32), ACTIVATION)
        if dz is not None:
            tl.store(dz + rows[:, None] * N + columns[None, :], value.to(dz.dtype.element_ty), mask=inside)
        total += value
    if sums is not None:
        tl.store(sums + part * N + columns, tl.sum(total, 0), mask=columns < N)


@implement(_linear_act)
def linear_act_triton(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, save: bool
) -> tuple[Tensor, Tensor]:
    refuse_fp64("linear_act", x)
    (rows, depth), columns = x.shape, len(weight)
    y = x.new_empty(rows, columns)
    saved = torch.empty_like(y) if save and ACTIVATIONS[activation].saves == "z" else x.new_empty(0)
    if not y.numel():
        return y, saved
    bias = None if bias is None else bias.contiguous()
    z = saved if saved.numel() else None
    tile = tiling.tile(chip(), x, weight, precision())
    linear_act_kernel[(tile.cover(rows, columns),)](
        x, weight, bias, y, z, rows, columns, depth, *x.stride(), *weight.stride(),
        ACTIVATION=activation, PRECISION=precision(), **tile._asdict(), enable_fp_fusion=False,
    )  # fmt: skip
    return y, saved


@implement(_linear_act_backward)
def linear_act_backward_triton(
    dy: Tensor,
    x: Tensor | None,
    weight: Tensor | None,
    saved: Tensor,
    activation: str,
    weight_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
    by_columns: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    refuse_fp64("linear_act_backward", dy)
    dx, dweight, dbias = (dy.new_empty(0) for _ in range(3))
    multiplies = weight is not None or weight_dtype is not None
    dz, sums = _dact(dy, saved, activation, multiplies, bias_dtype is not None)
    with without_autocast(dy):
        if weight is not None:
            dx = torch.mm(dz, weight)
        if weight_dtype is not None and x is not None:
            dweight = _mm(x.t(), dz, weight_dtype).t() if by_columns else _mm(dz.t(), x, weight_dtype)
    if bias_dtype is not None:
        dbias = sums.sum(0, dtype=torch.float64).to(bias_dtype)
    return dx, dweight, dbias


def _dact(dy: Tensor, saved: Tensor, activation: str, multiplies: bool, adds_up: bool) -> tuple[Tensor, Tensor]:
    """Return dz, and the sums of its columns over some rows each. Only what is asked for is computed."""
    rows, columns = dy.shape
    part_rows = max(PART_ROWS, triton.next_power_of_2(triton.cdiv(rows, PARTS)))
    part_rows = min(part_rows, MOST_ADDED * BLOCK["BLOCK_M"])
    parts = triton.cdiv(rows, part_rows)
    has_slope = ACTIVATIONS[activation].saves != ""
    dz = torch.empty_like(dy, memory_format=torch.contiguous_format) if has_slope and multiplies else None
    sums = dy.new_empty(parts, columns, dtype=torch.float32) if adds_up else None
    if dy.numel() and (dz is not None or sums is not None):
        dact_kernel[(triton.cdiv(columns, BLOCK["BLOCK_N"]), parts)](
            dy, saved if has_slope else None, dz, sums, rows, columns, *dy.stride(),
            *(saved.stride() if has_slope else (0, 0)), part_rows,
            ACTIVATION=activation, **BLOCK, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return dy if dz is None else dz, dy if sums is None else sums


def _mm(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype == a.dtype:
        return torch.mm(a, b)
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=dtype)
    return torch.mm(a.to(dtype), b.to(dtype))
