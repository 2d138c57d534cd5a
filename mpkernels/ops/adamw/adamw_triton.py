"""adamw_ in Triton: one program a chunk; the last program of a parameter counts the step."""

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
from mpkernels.ops._table import BLOCK, FP32, FP64, block_at, load_as, store_as
from mpkernels.ops.adamw import int8_kernel as int8
from mpkernels.ops.adamw.adamw import _adamw
from mpkernels.ops.adamw.arguments import Arguments
from mpkernels.ops.adamw.int8_kernel import QUANTIZED
from mpkernels.ops.adamw.scalars_kernel import GROUP, is_skipped, scalars_of, write_outcome
from mpkernels.ops.adamw.split_kernel import copied_master, join, split
from mpkernels.ops.grads.overflow_kernel import FIELDS, overflow_program

# Words of a row after the common ones: addresses of grad, exp_avg, exp_avg_sq, max_exp_avg_sq or 0, the weight (param
# or its fp32 master), the remainder or 0, step; dtypes of grad, states and weight; the group; address of scales or 0;
# how many of its programs are done.
ROW = tl.constexpr(_table.ROW.value + 13)


@triton.jit
def step_of(row):
    return tl.load(row + 10).to(tl.pointer_type(tl.float32))


@triton.jit
def adamw(weight, grad, exp_avg, exp_avg_sq, largest, amsgrad, numbers):
    factor, decay, weight1, beta2, weight2, step_size, eps = numbers
    compute: tl.constexpr = grad.dtype
    grad *= factor.to(compute)
    weight *= decay.to(compute)
    exp_avg += (grad - exp_avg) * weight1.to(compute)
    exp_avg_sq = exp_avg_sq * beta2.to(compute) + grad * weight2.to(compute) * grad
    larger = tl.where((largest != largest) | (largest > exp_avg_sq), largest, exp_avg_sq)
    largest = tl.where(amsgrad, larger, exp_avg_sq)
    update = step_size.to(compute) * exp_avg
    if compute == tl.float64:
        weight -= update / (tl.sqrt(largest) + eps)
    else:
        weight -= tl.div_rn(update, tl.sqrt_rn(largest) + eps.to(compute))
    return weight, exp_avg, exp_avg_sq, largest


@triton.jit
def load_weight(row, at, mask, compute: tl.constexpr):
    param, dtype, weight_at, remainder_at = tl.load(row), tl.load(row + 3), tl.load(row + 8), tl.load(row + 9)
    if compute == tl.float32 and remainder_at != 0:
        half = tl.load(block_at(param, at, mask, tl.int16), mask=mask)
        weight = join(half, tl.load(block_at(remainder_at, at, mask, tl.int16), mask=mask), dtype)
    else:
        weight = load_as(compute, tl.load(row + 13), weight_at, at, mask)
        if compute == tl.float32 and weight_at != param:
            weight = copied_master(weight, tl.load(block_at(param, at, mask, tl.int16), mask=mask), dtype)
    return weight


@triton.jit
def store_weight(weight, row, at, mask, compute: tl.constexpr):
    param, dtype, weight_at, remainder_at = tl.load(row), tl.load(row + 3), tl.load(row + 8), tl.load(row + 9)
    if compute == tl.float32 and remainder_at != 0:
        half, remainder = split(weight, dtype)
        tl.store(block_at(param, at, mask, tl.int16), half, mask=mask)
        tl.store(block_at(remainder_at, at, mask, tl.int16), remainder, mask=mask)
    else:
        store_as(weight, dtype, param, at, mask)
        if weight_at != param:
            store_as(weight, tl.load(row + 13), weight_at, at, mask)


@triton.jit
def step_block(row, at, mask, numbers, compute: tl.constexpr):
    exp_avg_at, exp_avg_sq_at, largest_at = tl.load(row + 5), tl.load(row + 6), tl.load(row + 7)
    state_dtype = tl.load(row + 12)
    weight = load_weight(row, at, mask, compute)
    grad = load_as(compute, tl.load(row + 11), tl.load(row + 4), at, mask)
    exp_avg = load_as(compute, state_dtype, exp_avg_at, at, mask)
    exp_avg_sq = load_as(compute, state_dtype, exp_avg_sq_at, at, mask)
    amsgrad = largest_at != 0
    largest = exp_avg_sq
    if amsgrad:
        largest = load_as(compute, state_dtype, largest_at, at, mask)
    weight, exp_avg, exp_avg_sq, largest = adamw(weight, grad, exp_avg, exp_avg_sq, largest, amsgrad, numbers)
    store_as(exp_avg, state_dtype, exp_avg_at, at, mask)
    store_as(exp_avg_sq, state_dtype, exp_avg_sq_at, at, mask)
    if amsgrad:
        store_as(largest, state_dtype, largest_at, at, mask)
    store_weight(weight, row, at, mask, compute)


@triton.jit
def load_codes(address, scales, at, mask, block, has_block, squared: tl.constexpr):
    codes = tl.load(address.to(tl.pointer_type(tl.int8)) + at, mask=mask, other=-128 if squared else 0)
    return int8.decode(codes, tl.load(scales + block, mask=has_block, other=0.0), squared)


@triton.jit
def store_codes(values, address, scales, at, mask, block, has_block, squared: tl.constexpr):
    codes, new_scales = int8.encode(values, mask, squared)
    tl.store(address.to(tl.pointer_type(tl.int8)) + at, codes, mask=mask)
    tl.store(scales + block, new_scales, mask=has_block)


@triton.jit
def step_int8(row, begin, size, numbers):
    exp_avg_at, exp_avg_sq_at, largest_at = tl.load(row + 5), tl.load(row + 6), tl.load(row + 7)
    blocks = tl.cdiv(tl.load(row + 1), QUANTIZED)
    scales = tl.load(row + 15).to(tl.pointer_type(tl.float32))
    count: tl.constexpr = BLOCK // 2
    for i in range(0, size, count):
        lanes = i + tl.arange(0, count)
        at, mask = begin + lanes, lanes < size
        block = (begin + i) // QUANTIZED + tl.arange(0, count // QUANTIZED)
        has_block = block < blocks
        weight = load_weight(row, at, mask, tl.float32)
        grad = load_as(tl.float32, tl.load(row + 11), tl.load(row + 4), at, mask)
        exp_avg = load_codes(exp_avg_at, scales, at, mask, block, has_block, False)
        exp_avg_sq = load_codes(exp_avg_sq_at, scales + blocks, at, mask, block, has_block, True)
        amsgrad = largest_at != 0
        largest = exp_avg_sq
        if amsgrad:
            largest = load_codes(largest_at, scales + 2 * blocks, at, mask, block, has_block, True)
        weight, exp_avg, exp_avg_sq, largest = adamw(weight, grad, exp_avg, exp_avg_sq, largest, amsgrad, numbers)
        store_codes(exp_avg, exp_avg_at, scales, at, mask, block, has_block, False)
        store_codes(exp_avg_sq, exp_avg_sq_at, scales + blocks, at, mask, block, has_block, True)
        if amsgrad:
            store_codes(largest, largest_at, scales + 2 * blocks, at, mask, block, has_block, True)
        store_weight(weight, row, at, mask, tl.float32)


@triton.jit
def step_span(row, begin, size, numbers, compute: tl.constexpr):
    addresses = tl.load(row)
    for word in tl.static_range(4, 10):
        addresses |= tl.load(row + word)
    whole = _table.whole_blocks(addresses, size)
    count: tl.constexpr = BLOCK // 8 if compute == tl.float64 else BLOCK // 2
    for i in range(0, whole, count):
        step_block(row, begin + i + tl.arange(0, count), None, numbers, compute)
    lanes = tl.arange(0, BLOCK // 8)
    for i in range(whole, size, BLOCK // 8):
        step_block(row, begin + i + lanes, i + lanes < size, numbers, compute)


@triton.jit(do_not_specialize=["tensors", "chunks"])
def adamw_kernel(
    words, tensors, chunks, grad_scale, found_inf, total_sumsq, outcome, skipped_steps, report, of_chunk,
    CHUNK: tl.constexpr, IS_CLIPPED: tl.constexpr, HAS_INT8: tl.constexpr,
):  # fmt: skip
    skipped = is_skipped(grad_scale, found_inf, total_sumsq)
    if tl.program_id(0) == 0:
        write_outcome(skipped, grad_scale, total_sumsq, outcome, skipped_steps)
    tensor, row, begin, size = _table.find_span(words, tensors, tl.program_id(0), CHUNK, ROW)
    if skipped:
        if report is not None:
            overflow_program(
                tl.program_id(0), row, tensor, begin, size, tl.load(row + 4), tl.load(row + 11), row + 16,
                report, of_chunk, grad_scale, CHUNK=CHUNK, UNSCALED=False,
            )  # fmt: skip
        return
    clipped_by = total_sumsq if IS_CLIPPED else None
    group = words + tensors * ROW + chunks + tl.load(row + 14) * GROUP
    numbers = scalars_of(group, tl.load(step_of(row)), grad_scale, clipped_by)
    if tl.load(row + 3) == FP64:
        step_span(row, begin, size, numbers, tl.float64)
    elif HAS_INT8 and tl.load(row + 15) != 0:
        step_int8(row, begin, size, numbers)
    else:
        step_span(row, begin, size, numbers, tl.float32)
    if _table.is_last_one_out(row + 16, tl.maximum(tl.cdiv(tl.load(row + 1), CHUNK), 1)):
        tl.store(step_of(row), tl.load(step_of(row)) + 1)


def own_words(grad: Tensor, arrays: Sequence[Tensor], scales: Tensor, step: Tensor, group: int) -> list[int]:
    param, exp_avg, _, _, master = arrays
    is_split = master.dtype == torch.int16
    weight = param if is_split or not master.numel() else master
    addresses = [it.data_ptr() for it in (grad, *arrays[1:4], weight)]
    dtypes = [_table.CODES.get(it.dtype, FP32.value) for it in (grad, exp_avg, weight)]  # int8 moments become fp32
    remainder = master.data_ptr() if is_split else 0
    return [*addresses, remainder, step.data_ptr(), *dtypes, group, scales.data_ptr(), 0]


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
    table = _table.build(flat, group_words(call), own)
    of_chunk = None if call.report is None else call.report.new_empty(table.chunks * FIELDS.value)
    adamw_kernel[(table.chunks,)](
        *table, call.grad_scale, call.found_inf, call.total_sumsq, call.outcome, call.skipped_steps, call.report,
        of_chunk, CHUNK=_table.CHUNK, IS_CLIPPED=call.max_norm < math.inf,
        HAS_INT8=any(it.numel() for it in call.scales), enable_fp_fusion=False,
    )  # fmt: skip
    for original, copy in loans:
        if copy is not original:
            original.copy_(copy)
