"""A step in Triton: one program per chunk; the last program that reads a parameter's step counts the step up."""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator"

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mpkernels.ops import _tensor_table
from mpkernels.ops._tensor_table import AT_SIZE, BLOCK, FP64, INT8
from mpkernels.ops.grads.overflow_kernel import FIELDS, overflow_program
from mpkernels.ops.step import row_words_kernel as row_words
from mpkernels.ops.step.block_int8_kernel import step_int8
from mpkernels.ops.step.block_kernel import COUNT, arrays_of, moved, step_span
from mpkernels.ops.step.op import order_like
from mpkernels.ops.step.rule import Rule
from mpkernels.ops.step.scalars_kernel import rounded, scalars_of
from mpkernels.ops.step.schema import Arguments, entry
from mpkernels.ops.step.skip_and_clip_kernel import is_skipped, write_outcome

CHUNK = 16384  # elements; a program reads 14 bytes or more for each, of all arrays together


@triton.jit
def report_span(rows, call, tensors, report, chunk_lines, grad_scale):
    chunk = tl.program_id(0)
    tensor, row, begin, size = _tensor_table.find_span(rows, tensors, chunk, row_words.ROW)
    grad, grad_dtype = tl.load(call + tensor), tl.load(row + row_words.GRAD_DTYPE)
    overflow_program(
        chunk, row, tensor, begin, size, grad, grad_dtype, call + tensors + tensor, report, chunk_lines, grad_scale,
        False,
    )  # fmt: skip


@triton.jit
def begin_step(rows, call, tensors, grad_scale, found_inf, total_sumsq, outcome, skipped_steps, report, chunk_lines):
    """Return whether the step is skipped, after writing its outcome and, of a skipped step, the report."""
    skipped = is_skipped(grad_scale, found_inf, total_sumsq)
    if tl.program_id(0) == 0:
        write_outcome(skipped, grad_scale, total_sumsq, outcome, skipped_steps)
    if report is not None and skipped:
        report_span(rows, call, tensors, report, chunk_lines, grad_scale)
    return skipped


@triton.jit(do_not_specialize=["tensors"])
def step_kernel(
    rows, call, tensors, grad_scale, found_inf, total_sumsq, outcome, skipped_steps, report, chunk_lines,
    IS_CLIPPED: tl.constexpr, HAS_FP64: tl.constexpr, HAS_INT8: tl.constexpr, HAS_OPTIONAL: tl.constexpr,
    HAS_REMAINDER: tl.constexpr, DTYPE: tl.constexpr, GRAD_DTYPE: tl.constexpr, STATE_DTYPE: tl.constexpr,
    WEIGHT_DTYPE: tl.constexpr, STATES: tl.constexpr, NEEDED: tl.constexpr, NOT_NEGATIVE: tl.constexpr,
    MAY_BE_TENSORS: tl.constexpr, HYPERPARAMETERS: tl.constexpr, SCALARS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Step one chunk. The last seven arguments are the rule's: what ``Rule`` says, and its functions."""
    if begin_step(rows, call, tensors, grad_scale, found_inf, total_sumsq, outcome, skipped_steps, report, chunk_lines):
        return
    tensor, row, begin, size = _tensor_table.find_span(rows, tensors, tl.program_id(0), row_words.ROW)
    step = tl.load(row + row_words.STEP).to(tl.pointer_type(tl.float32))
    steps_before = tl.load(step)
    if _tensor_table.is_last_one_out(
        call + tensors + tensor, _tensor_table.chunks_of(row)
    ):  # the others have read the count
        tl.store(step, steps_before + 1)
    group = call + 2 * tensors + 1 + tl.load(row + row_words.GROUP) * (2 * MAY_BE_TENSORS + HYPERPARAMETERS + 2)
    norm_of = total_sumsq if IS_CLIPPED else None
    scalars = scalars_of(group, steps_before, grad_scale, norm_of, MAY_BE_TENSORS, HYPERPARAMETERS, SCALARS, NEEDED)
    arrays = arrays_of(
        row, tl.load(call + tensor), DTYPE, GRAD_DTYPE, STATE_DTYPE, WEIGHT_DTYPE, HAS_OPTIONAL, HAS_REMAINDER,
        STATES, NEEDED,
    )  # fmt: skip
    arrays = moved(arrays, begin, NEEDED)
    if HAS_FP64 and arrays.dtype == FP64:
        step_span(arrays, size, scalars, True, NEEDED, STEP)
    elif HAS_INT8 and arrays.state_dtype == INT8:
        scales = tl.load(row + row_words.SCALES).to(tl.pointer_type(tl.float32))
        whole: tl.constexpr = COUNT if HAS_OPTIONAL or DTYPE is None else BLOCK  # else 3 states or any dtype spill
        step_int8(
            arrays, begin, size, tl.load(row + AT_SIZE), scales, rounded(scalars), whole, NEEDED, NOT_NEGATIVE, STEP
        )
    else:
        step_span(arrays, size, rounded(scalars), False, NEEDED, STEP)


def facts_of_rule(rule: Rule) -> dict[str, int]:
    not_negative = sum((state in rule.not_negative) << i for i, state in enumerate(rule.states))
    return {
        "STATES": len(rule.states), "NEEDED": rule.needed, "NOT_NEGATIVE": not_negative,
        "MAY_BE_TENSORS": rule.may_be_tensors, "HYPERPARAMETERS": len(rule.hyperparameters),
    }  # fmt: skip


def group_words(rule: Rule, call: Arguments) -> list[int]:
    groups = len(call.group_sizes)
    sign = [-1.0 if it else 1.0 for it in call.maximize]
    numbers = (*call.hyperparameters, sign, [call.max_norm] * groups)
    by_value = torch.tensor(numbers, dtype=torch.float64, device="cpu").view(torch.int64).t()
    tensors = [(it.data_ptr(), _tensor_table.CODES[it.dtype]) for it in call.on_device] or [(0, 0)] * (
        rule.may_be_tensors * groups
    )
    pairs = torch.tensor(tensors, device="cpu").view(-1, rule.may_be_tensors, 2)
    by_tensor = pairs.transpose(1, 2).reshape(-1, 2 * rule.may_be_tensors)
    words: list[int] = torch.cat((by_tensor, by_value), 1).flatten().tolist()
    return words


def launch(rule: Rule, scalars: Any, step: Any, *arguments: Any) -> None:
    """Run the kernel over the arguments of a rule's op. ``scalars`` and ``step`` are the rule's, in Triton."""
    call = Arguments.of(rule, arguments)
    if not call.params:
        return
    nothing = call.params[0].new_empty(0)  # an empty tensor's address is 0
    loans: list[tuple[Tensor, Tensor]] = []
    flat, words_of_rows, grads = [], [], []
    for i, group in enumerate(call.group_numbers()):
        like = order_like(call, i)
        arrays = []
        for entries in (call.params, *call.states, call.masters):
            tensor = entry(entries, i)
            arrays.append(nothing if tensor is None else _tensor_table.lend(tensor, like))
            if tensor is not None:
                loans.append((tensor, arrays[-1]))
        flat.append(arrays[0])
        grads.append(_tensor_table.lend(call.grads[i], like))
        words_of_rows.append(row_words.words(call, i, group, arrays, grads[i]))
    rows, words, tensors, chunks = _tensor_table.build(
        flat,
        [grad.data_ptr() for grad in grads],
        call_words=group_words(rule, call),
        row_words=words_of_rows,
        chunk=CHUNK,
    )
    chunk_lines = None if call.report is None else call.report.new_empty(chunks * FIELDS.value)
    step_kernel[(chunks,)](
        rows, words, tensors, call.grad_scale, call.found_inf, call.total_sumsq, call.outcome, call.skipped_steps,
        call.report, chunk_lines, IS_CLIPPED=call.max_norm < math.inf, **row_words.facts(rule, flat, words_of_rows),
        **facts_of_rule(rule), SCALARS=scalars, STEP=step, enable_fp_fusion=False,
    )  # fmt: skip
    for original, copy in loans:
        if copy is not original:
            original.copy_(copy)
