"""adamw_ in Triton: one program a chunk; the last program of a parameter to read its step counts it up."""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator"

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mpkernels.ops import _table
from mpkernels.ops._registry import implement
from mpkernels.ops._table import BLOCK, FP64, INT8
from mpkernels.ops.adamw.adamw import _adamw
from mpkernels.ops.adamw.arguments import Arguments
from mpkernels.ops.adamw.block_int8_kernel import step_int8
from mpkernels.ops.adamw.block_kernel import COUNT, arrays_of, moved, step_span
from mpkernels.ops.adamw.scalars_kernel import GROUP, is_skipped, rounded, scalars_of, write_outcome
from mpkernels.ops.grads.overflow_kernel import FIELDS, overflow_program

# Words of a row after the common ones: addresses of param, exp_avg, exp_avg_sq, max_exp_avg_sq or 0, the weight (param
# or its fp32 master), the remainder or 0, step; dtypes of grad, states and weight; the group; address of scales or 0.
ROW = tl.constexpr(_table.ROW.value + 12)
CHUNK = 16384  # elements; a program reads 14 bytes or more for each, of all arrays together


@triton.jit
def report_span(rows, call, tensors, report, of_chunk, grad_scale):
    chunk = tl.program_id(0)
    tensor, row, begin, size = _table.find_span(rows, tensors, chunk, ROW)
    overflow_program(
        chunk, row, tensor, begin, size, tl.load(call + tensor), tl.load(row + 11), call + tensors + tensor,
        report, of_chunk, grad_scale, False,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tensors"])
def adamw_kernel(
    rows, call, tensors, grad_scale, found_inf, total_sumsq, outcome, skipped_steps, report, of_chunk,
    IS_CLIPPED: tl.constexpr, HAS_FP64: tl.constexpr, HAS_INT8: tl.constexpr, HAS_LARGEST: tl.constexpr,
    HAS_REMAINDER: tl.constexpr, DTYPE: tl.constexpr, GRAD_DTYPE: tl.constexpr, STATE_DTYPE: tl.constexpr,
    WEIGHT_DTYPE: tl.constexpr,
):  # fmt: skip
    skipped = is_skipped(grad_scale, found_inf, total_sumsq)
    if tl.program_id(0) == 0:
        write_outcome(skipped, grad_scale, total_sumsq, outcome, skipped_steps)
    if skipped:
        if report is not None:
            report_span(rows, call, tensors, report, of_chunk, grad_scale)
        return
    tensor, row, begin, size = _table.find_span(rows, tensors, tl.program_id(0), ROW)
    step = tl.load(row + 10).to(tl.pointer_type(tl.float32))
    steps_before = tl.load(step)
    if _table.is_last_one_out(call + tensors + tensor, _table.chunks_of(row)):  # of those that need the count as it was
        tl.store(step, steps_before + 1)
    group = call + 2 * tensors + 1 + tl.load(row + 14) * GROUP
    scalars = scalars_of(group, steps_before, grad_scale, total_sumsq if IS_CLIPPED else None)
    arrays = arrays_of(
        row, tl.load(call + tensor), DTYPE, GRAD_DTYPE, STATE_DTYPE, WEIGHT_DTYPE, HAS_LARGEST, HAS_REMAINDER
    )  # fmt: skip
    arrays = moved(arrays, begin)
    if HAS_FP64 and arrays[7] == FP64:
        step_span(arrays, size, scalars, True)
    elif HAS_INT8 and arrays[9] == INT8:
        scales = tl.load(row + 15).to(tl.pointer_type(tl.float32))
        whole: tl.constexpr = COUNT if HAS_LARGEST else BLOCK  # three moments of BLOCK spill
        step_int8(arrays, begin, size, tl.load(row), scales, rounded(scalars), whole)
    else:
        step_span(arrays, size, rounded(scalars), False)


def own_words(grad: Tensor, arrays: Sequence[Tensor], scales: Tensor, step: Tensor, group: int) -> list[int]:
    param, exp_avg, _, _, master = arrays
    is_split = master.dtype == torch.int16
    weight = param if is_split or not master.numel() else master
    addresses = [it.data_ptr() for it in (*arrays[:4], weight)]
    dtypes = [_table.CODES[it.dtype] for it in (grad, exp_avg, weight)]
    remainder = master.data_ptr() if is_split else 0
    return [*addresses, remainder, step.data_ptr(), *dtypes, group, scales.data_ptr()]


def facts_of(params: Sequence[Tensor], own: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return what the compiler may know of all rows: a kernel for fp64 alone, say, has no registers for others."""
    _, _, _, largest, _, remainder, _, grad_dtype, state_dtype, weight_dtype, _, _ = map(set, zip(*own, strict=True))
    dtype = {_table.CODES[it.dtype] for it in params}
    dtypes = {"DTYPE": dtype, "GRAD_DTYPE": grad_dtype, "STATE_DTYPE": state_dtype, "WEIGHT_DTYPE": weight_dtype}
    return {
        "HAS_FP64": FP64.value in dtype, "HAS_INT8": INT8.value in state_dtype,
        "HAS_LARGEST": largest != {0}, "HAS_REMAINDER": remainder != {0},
        **{name: min(codes) if len(codes) == 1 else None for name, codes in dtypes.items()},
    }  # fmt: skip


def group_words(call: Arguments) -> list[int]:
    groups = len(call.lr)
    sign = [-1.0 if it else 1.0 for it in call.maximize]
    numbers = (call.lr, call.beta1, call.beta2, call.weight_decay, call.eps, sign, [call.max_norm] * groups)
    by_value = torch.tensor(numbers, dtype=torch.float64, device="cpu").view(torch.int64).t()
    tensors = [(it.data_ptr(), _table.CODES[it.dtype]) for it in call.on_device] or [(0, 0)] * (3 * groups)
    by_tensor = torch.tensor(tensors, device="cpu").view(-1, 3, 2).transpose(1, 2).reshape(-1, 6)
    words: list[int] = torch.cat((by_tensor, by_value), 1).flatten().tolist()
    return words


@implement(_adamw)
def adamw_triton(*arguments: Any) -> None:
    call = Arguments(*arguments)
    if not call.params:
        return
    nothing = call.params[0].new_empty(0)  # whose address is 0
    loans: list[tuple[Tensor, Tensor]] = []
    flat, own, grads = [], [], []
    for i, group in enumerate(call.group_of_each()):
        # Codes stay in the order that they have: each block of it shares a scale.
        like = call.exp_avgs[i] if call.exp_avgs[i].dtype == torch.int8 else call.params[i]
        arrays = []
        for name in ("params", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "masters"):
            tensor = call.entry(name, i)
            arrays.append(nothing if tensor is None else _table.lend(tensor, like))
            if tensor is not None:
                loans.append((tensor, arrays[-1]))
        flat.append(arrays[0])
        grads.append(_table.lend(call.grads[i], like))
        own.append(own_words(grads[i], arrays, call.scales[i] if call.scales else nothing, call.steps[i], group))
    rows, words, tensors, chunks = _table.build(
        flat, [it.data_ptr() for it in grads], beside=group_words(call), own=own, chunk=CHUNK
    )
    of_chunk = None if call.report is None else call.report.new_empty(chunks * FIELDS.value)
    adamw_kernel[(chunks,)](
        rows, words, tensors, call.grad_scale, call.found_inf, call.total_sumsq, call.outcome, call.skipped_steps,
        call.report, of_chunk, IS_CLIPPED=call.max_norm < math.inf, **facts_of(flat, own), enable_fp_fusion=False,
    )  # fmt: skip
    for original, copy in loans:
        if copy is not original:
            original.copy_(copy)
