"""update_scale_ in Triton: one program."""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator, valid-type"

from typing import Any

import triton
import triton.language as tl

from mpkernels.ops._registry import implement
from mpkernels.ops._tensor_table import is_non_finite
from mpkernels.ops.grads.update_scale import _update_scale


@triton.jit(do_not_specialize=["growth_interval", "hysteresis"])
def update_scale_kernel(
    scale, growth_tracker, found_inf, growth_factor: tl.float64, backoff_factor: tl.float64, growth_interval,
    overflows, min_scale: tl.float64, max_scale: tl.float64, hysteresis,
):  # fmt: skip
    before = tl.load(scale)
    if tl.load(found_inf) != 0:
        in_a_row = tl.load(overflows) + 1
        lowest = tl.full((), min_scale, tl.float64)
        backed_off = before.to(tl.float64) * backoff_factor
        backed_off = tl.where(backed_off < lowest, lowest, backed_off).to(tl.float32)
        tl.store(scale, tl.where(in_a_row >= hysteresis, backed_off, before))
        tl.store(growth_tracker, 0)
        tl.store(overflows, in_a_row)
        tl.store(overflows + 1, tl.load(overflows + 1) + 1)
    else:
        steps = tl.load(growth_tracker) + 1
        is_due = steps == growth_interval
        highest = tl.full((), max_scale, tl.float64)
        grown = before.to(tl.float64) * growth_factor
        grown = tl.where(grown > highest, highest, grown).to(tl.float32)
        tl.store(scale, tl.where(is_due & (is_non_finite(grown) == 0), grown, before))
        tl.store(growth_tracker, tl.where(is_due, 0, steps))
        tl.store(overflows, 0)


@implement(_update_scale)
def update_scale_triton(*arguments: Any) -> None:
    update_scale_kernel[(1,)](*arguments, enable_fp_fusion=False)
