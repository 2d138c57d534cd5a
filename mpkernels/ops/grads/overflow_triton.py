"""overflow_ in Triton: one program per chunk; the last program of a grad merges its chunks."""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator"

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from mpkernels.ops import _tensor_table
from mpkernels.ops._registry import implement
from mpkernels.ops._tensor_table import AT_DTYPE, ROW, find_span
from mpkernels.ops.grads.overflow import _overflow
from mpkernels.ops.grads.overflow_kernel import FIELDS, overflow_program


@triton.jit(do_not_specialize=["tensors"])
def overflow_kernel(rows, call, tensors, found_inf, scale, report, chunk_lines, UNSCALED: tl.constexpr):
    if tl.load(found_inf) == 0:
        return
    chunk = tl.program_id(0)
    number, row, begin, size = find_span(rows, tensors, chunk, ROW)
    overflow_program(
        chunk, row, number, begin, size, tl.load(call + number), tl.load(row + AT_DTYPE), call + tensors + number,
        report, chunk_lines, scale, UNSCALED,
    )  # fmt: skip


@implement(_overflow)
def overflow_triton(
    grads: Sequence[Tensor], found_inf: Tensor, scale: Tensor | None, unscaled: bool, report: Tensor
) -> None:
    if not grads:
        return
    flat = [grad if _tensor_table.is_dense(grad) else grad.contiguous() for grad in grads]
    rows, call, tensors, chunks = _tensor_table.build(flat, [grad.data_ptr() for grad in flat])
    chunk_lines = torch.empty(chunks * FIELDS.value, dtype=torch.float64, device=report.device)
    overflow_kernel[(chunks,)](
        rows, call, tensors, found_inf, scale, report, chunk_lines, UNSCALED=unscaled, enable_fp_fusion=False
    )
