"""Says which words a row of a step has in Triton: the host writes them, and kernels read them."""

from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from mpkernels.ops import _tensor_table
from mpkernels.ops._tensor_table import CODES, FP64, INT8
from mpkernels.ops.step.rule import Rule
from mpkernels.ops.step.schema import Arguments, entry

MOST_STATES = 3

# Where a row, after the common words, has addresses (0 where there is no array), dtypes, and the group's number. The
# weight is the parameter, or its fp32 master.
PARAM, STATES = (tl.constexpr(_tensor_table.ROW.value + number) for number in range(2))
WEIGHT, REMAINDER, STEP, GRAD_DTYPE, STATE_DTYPE, WEIGHT_DTYPE, GROUP, SCALES, ROW = (
    tl.constexpr(STATES.value + MOST_STATES + number) for number in range(9)
)


def words(call: Arguments, i: int, group: int, arrays: Sequence[Tensor], grad: Tensor) -> list[int]:
    """Return what row i holds after the common words. ``arrays`` are param, states and master, as the kernel takes
    them."""
    param, *states, master = arrays
    is_split = master.dtype == torch.int16
    weight = param if is_split or not master.numel() else master
    addresses = [tensor.data_ptr() for tensor in (param, *states)] + [0] * (MOST_STATES - len(states))
    scales = entry(call.scales, i)
    state_dtypes = [state.dtype for state in states if state.numel()] or [torch.float32]
    state_dtype = torch.float64 if param.dtype == torch.float64 else state_dtypes[0]
    dtypes = [CODES[dtype] for dtype in (grad.dtype, state_dtype, weight.dtype)]
    remainder = master.data_ptr() if is_split else 0
    others = weight.data_ptr(), remainder, call.steps[i].data_ptr(), *dtypes, group
    return [*addresses, *others, 0 if scales is None else scales.data_ptr()]


def facts(rule: Rule, params: Sequence[Tensor], rows: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return what the compiler may know of all rows: a kernel for fp64 alone, say, has no registers for others."""
    _, *states, _, remainder, _, grad_dtype, state_dtype, weight_dtype, _, _ = map(set, zip(*rows, strict=True))
    dtype = {CODES[param.dtype] for param in params}
    dtypes = {"DTYPE": dtype, "GRAD_DTYPE": grad_dtype, "STATE_DTYPE": state_dtype, "WEIGHT_DTYPE": weight_dtype}
    optional = states[rule.needed : len(rule.states)]
    return {
        "HAS_FP64": FP64.value in dtype, "HAS_INT8": INT8.value in state_dtype,
        "HAS_OPTIONAL": any(addresses != {0} for addresses in optional), "HAS_REMAINDER": remainder != {0},
        **{name: min(codes) if len(codes) == 1 else None for name, codes in dtypes.items()},
    }  # fmt: skip
