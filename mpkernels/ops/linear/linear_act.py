"""linear_act: y = f(x W^T + b) and its backward, each one op.

Both compute in fp32 and round each result once. Where torch multiplies 16-bit matrices as they are, z and dz are
rounded as torch rounds them. Only the reference computes fp64; kernels refuse it. For kernels:

``linear_act(x, weight, bias, activation, save) -> (y, saved)``
    x [M, K], weight [N, K], bias [N] or None: one dtype of fp16, bf16, fp32, any strides, any size down to 0.
    y is [M, N], contiguous. saved is z, [M, N] in x's dtype, if ``save`` and ACTIVATIONS[activation].saves == "z";
    else a tensor of shape [0]. Neither may share memory with an argument or with the other.
``linear_act_backward(dy, x, weight, saved, activation, weight_dtype, bias_dtype, by_columns) -> (dx, dweight, dbias)``
    dy [M, N], any strides (expanded ones are common); saved as ACTIVATIONS[activation].saves says: z or y, [M, N], or
    [0]. dx [M, K], in dy's dtype, is wanted if ``weight`` is given; dweight [N, K] if ``weight_dtype`` is (then x is,
    too); dbias [N] if ``bias_dtype`` is. These are the dtypes of dweight and dbias: dy's or fp32. A result that is not
    wanted has shape [0]. dweight is contiguous or, with ``by_columns``, the transpose of a contiguous matrix.
    dz = f'(saved) dy is kept in fp32 as long as a kernel can; sums run in a fixed order.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.flop_counter import register_flop_formula

from mpkernels.ops import _checks
from mpkernels.ops._autocast import without_autocast
from mpkernels.ops._registry import define
from mpkernels.ops.linear import TRITON
from mpkernels.ops.linear.activations import ACTIVATIONS, check_activation


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, save: bool) -> None:
    _checks.matrix("linear_act", "x", x, None, None)
    _checks.matrix("linear_act", "weight", weight, (None, x.shape[1]), x)
    if bias is not None:
        _checks.matrix("linear_act", "bias", bias, (weight.shape[0],), x)
    check_activation("linear_act", activation)


def _to(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    """Cast as ``tensor.to`` does, but call nothing for the same dtype: a compiled autograd Function of torch 2.11 would
    lose the gradient."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def _reference(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, save: bool) -> tuple[Tensor, Tensor]:
    compute = torch.promote_types(x.dtype, torch.float32)
    with without_autocast(x):
        z = functional.linear(_to(compute, x), _to(compute, weight), None if bias is None else _to(compute, bias))
    y = _to(x.dtype, ACTIVATIONS[activation].forward(z))
    return y, _to(x.dtype, z) if save and ACTIVATIONS[activation].saves == "z" else x.new_empty(0)


_linear_act = define(
    "linear_act(Tensor x, Tensor weight, Tensor? bias, str activation, bool save) -> (Tensor, Tensor)",
    check=_check,
    triton_module=TRITON,
)(_reference)


def _check_backward(
    dy: Tensor,
    x: Tensor | None,
    weight: Tensor | None,
    saved: Tensor,
    activation: str,
    weight_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
    by_columns: bool = False,
) -> None:
    op = "linear_act_backward"
    check_activation(op, activation)
    _checks.matrix(op, "dy", dy, None, None)
    rows, columns = dy.shape
    if x is not None:
        _checks.matrix(op, "x", x, (rows, None), dy)
    if weight is not None:
        _checks.matrix(op, "weight", weight, (columns, None), dy)
    _checks.matrix(op, "saved", saved, (rows, columns) if ACTIVATIONS[activation].saves else (0,), dy)
    if weight_dtype is not None and x is None:
        raise TypeError(f"{op}: x must be a tensor where weight_dtype is given, got None")
    _checks.gradient_dtype(op, "weight_dtype", weight_dtype, dy)
    _checks.gradient_dtype(op, "bias_dtype", bias_dtype, dy)


def _reference_backward(
    dy: Tensor,
    x: Tensor | None,
    weight: Tensor | None,
    saved: Tensor,
    activation: str,
    weight_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
    by_columns: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    compute = torch.promote_types(dy.dtype, torch.float32)
    dx, dweight, dbias = (dy.new_empty(0) for _ in range(3))
    with without_autocast(dy):
        dz = ACTIVATIONS[activation].backward(dy.to(compute), saved.to(compute))
        if weight is not None:
            dx = (dz @ weight.to(compute)).to(dy.dtype)
        if weight_dtype is not None and x is not None:
            dweight = weight_gradient(dz, x.to(compute), by_columns).to(weight_dtype)
        if bias_dtype is not None:
            dbias = dz.sum(0).to(bias_dtype)
    return dx, dweight, dbias


def weight_gradient(dz: Tensor, x: Tensor, by_columns: bool) -> Tensor:
    return (x.t() @ dz).t() if by_columns else dz.t() @ x


_linear_act_backward = define(
    "linear_act_backward(Tensor dy, Tensor? x, Tensor? weight, Tensor saved, str activation, "
    "ScalarType? weight_dtype, ScalarType? bias_dtype, bool by_columns=False) -> (Tensor, Tensor, Tensor)",
    check=_check_backward,
    triton_module=TRITON,
)(_reference_backward)


@register_flop_formula(_linear_act.overload.overloadpacket)
def _flops(x: torch.Size, weight: torch.Size, *_: Any, **__: Any) -> int:
    """Count the product's flops, as torch counts its own."""
    return 2 * x.numel() * weight[0]


@register_flop_formula(_linear_act_backward.overload.overloadpacket)
def _flops_backward(
    dy: torch.Size,
    x: torch.Size | None,
    weight: torch.Size | None,
    saved: torch.Size,
    activation: str,
    weight_dtype: torch.dtype | None,
    *_: Any,
    **__: Any,
) -> int:
    products = [weight] if weight is not None else []
    if weight_dtype is not None and x is not None:
        products.append(x)
    return sum(2 * dy.numel() * shape[1] for shape in products)
