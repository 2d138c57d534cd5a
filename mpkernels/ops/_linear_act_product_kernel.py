"""What the matrix products of linear_act share, however they read their operands."""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator"

import triton
import triton.language as tl

GROUP = tl.constexpr(8)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def tile_of(number, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Programs that run at once work in a few rows of tiles, and read the same weights."""
    width = GROUP * tl.cdiv(N, BLOCK_N)
    first = number // width * GROUP
    height = tl.minimum(tl.cdiv(M, BLOCK_M) - first, GROUP)
    return first + number % width % height, number % width // height


@triton.jit
def multiply_add(a, b, total, PRECISION: tl.constexpr):
    if INTERPRETED:  # it keeps bf16 as integers, and would multiply those
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision=PRECISION)


@triton.jit
def add_bias(total, bias, columns, N):
    if bias is not None:
        total += tl.load(bias + columns, mask=columns < N, other=0).to(tl.float32)[None, :]
    return total


def chip() -> str:
    """The key in TILES of the chip at hand, or of one that has no more shared memory."""
    if triton.knobs.runtime.interpret:
        return "sm_80"
    target = triton.runtime.driver.active.get_current_target()
    if target.backend == "hip":
        return "gfx942"
    return {9: "sm_90", 10: "sm_100"}.get(target.arch // 10, "sm_80")
