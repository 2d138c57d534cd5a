"""What the matrix products of linear_act share, however they read their operands."""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from mpkernels.ops.linear.tf32 import uses_tf32

GROUP = tl.constexpr(8)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def tile_of(number, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return a program's tile. Programs that run at once get tiles in a few rows, and read the same weights."""
    width = GROUP * tl.cdiv(N, BLOCK_N)
    first = number // width * GROUP
    height = tl.minimum(tl.cdiv(M, BLOCK_M) - first, GROUP)
    return first + number % width % height, number % width // height


@triton.jit
def multiply_add(a, b, total, PRECISION: tl.constexpr):
    if INTERPRETED:  # the interpreter keeps bf16 as integers, and would multiply those
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision=PRECISION)


@triton.jit
def multiply(
    a, b, rows, columns, M, N, K, a_row, a_column, b_row, b_column, PRECISION: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """Return some rows of a [M, K] times some columns of b [K, N], in any strides."""
    depth = tl.arange(0, BLOCK_K)
    a_block = a + rows[:, None] * a_row + depth.to(tl.int64)[None, :] * a_column
    b_block = b + columns[None, :] * b_column + depth.to(tl.int64)[:, None] * b_row
    step = tl.full([], BLOCK_K, tl.int64)
    total = tl.zeros([rows.shape[0], columns.shape[0]], tl.float32)
    for begin in range(0, K, BLOCK_K):
        left = depth < K - begin
        a_part = tl.load(a_block, mask=(rows < M)[:, None] & left[None, :], other=0)
        b_part = tl.load(b_block, mask=(columns < N)[None, :] & left[:, None], other=0)
        total = multiply_add(a_part, b_part, total, PRECISION)
        a_block += step * a_column
        b_block += step * b_row
    return total


@triton.jit
def add_bias(total, bias, columns, N):
    if bias is not None:
        total += tl.load(bias + columns, mask=columns < N, other=0).to(tl.float32)[None, :]
    return total


def chip() -> str:
    """Return the key in TILES of the chip at hand, or of one that has no more shared memory."""
    if triton.knobs.runtime.interpret:
        return "sm_80"
    target = triton.runtime.driver.active.get_current_target()
    if target.backend == "hip":
        return "gfx942"
    return {9: "sm_90", 10: "sm_100", 12: "sm_120"}.get(target.arch // 10, "sm_80")


def precision() -> str:
    """Return the precision of fp32's products: TF32 only where torch may."""
    return "tf32" if uses_tf32() else "ieee"


def refuse_fp64(op: str, tensor: Tensor) -> None:
    if tensor.dtype == torch.float64:
        raise TypeError(f"{op}: the Triton kernel takes fp16, bf16 and fp32, got {tensor.dtype}")
