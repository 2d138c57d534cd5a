"""What a step's Triton kernel computes once for a parameter."""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator,assignment"

import triton
import triton.language as tl

from mpkernels.ops._tensor_table import FP64
from mpkernels.ops.step.skip_and_clip_kernel import grad_factor, load_fp64

# Words of a group: the addresses of hyperparameters that are tensors, else 0; the dtypes of those; as fp64 all
# hyperparameters by value, the grads' sign, max_norm.


@triton.jit
def hyperparameter(group, which: tl.constexpr, MAY_BE_TENSORS: tl.constexpr):
    value = load_fp64(group + 2 * MAY_BE_TENSORS + which)
    if which < MAY_BE_TENSORS:
        address = tl.load(group + which)
        if address != 0:
            if tl.load(group + MAY_BE_TENSORS + which) == FP64:
                value = tl.load(address.to(tl.pointer_type(tl.float64)))
            else:
                value = tl.load(address.to(tl.pointer_type(tl.float32))).to(tl.float64)
    return value


@triton.jit
def scalars_of(
    group,
    steps_before,
    grad_scale,
    total_sumsq,
    MAY_BE_TENSORS: tl.constexpr,
    HYPERPARAMETERS: tl.constexpr,
    SCALARS: tl.constexpr,
    NEEDED: tl.constexpr,
):
    """Return what grads are multiplied by, and the rule's scalars, in fp64."""
    sign_and_max_norm, hyperparameters = group + 2 * MAY_BE_TENSORS + HYPERPARAMETERS, ()
    if NEEDED == 0:  # a kernel without states has so few registers that hyperparameters spill around these divisions
        factor = grad_factor(sign_and_max_norm, grad_scale, total_sumsq)
    for which in tl.static_range(HYPERPARAMETERS):
        hyperparameters += (hyperparameter(group, which, MAY_BE_TENSORS),)
    if NEEDED > 0:
        factor = grad_factor(sign_and_max_norm, grad_scale, total_sumsq)
    return factor, SCALARS(hyperparameters, steps_before.to(tl.float64) + 1)


@triton.jit
def rounded(scalars):
    """Return the scalars in fp32."""
    factor, rule_scalars = scalars
    in_fp32 = ()
    for i in tl.static_range(len(rule_scalars)):
        in_fp32 += (rule_scalars[i].to(tl.float32),)
    return factor.to(tl.float32), in_fp32
