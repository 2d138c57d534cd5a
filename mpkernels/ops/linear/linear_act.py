"""linear_act: y = f(x W^T + b) and its backward, each one op.

Both compute in fp32 and round each result once; fp64 is the reference's alone, kernels refuse it. For kernels:

``linear_act(x, weight, bias, activation, save) -> (y, saved)``
    x [M, K], weight [N, K], bias [N] or None: one dtype of fp16, bf16, fp32, any strides, any size down to 0.
    y is [M, N], contiguous. saved is z, [M, N] in x's dtype, if ``save`` and ACTIVATIONS[activation].saves == "z";
    else a tensor of shape [0]. Neither may share memory with an argument or with the other.
``linear_act_backward(dy, x, weight, saved, activation, weight_dtype, bias_dtype) -> (dx, dweight, dbias)``
    dy [M, N], any strides (expanded ones are common); saved as ACTIVATIONS[activation].saves says: z or y, [M, N], or
    [0]. A result is wanted where this is given: dx [M, K] in dy's dtype where ``weight`` is, dweight [N, K] in
    ``weight_dtype`` where that is (then x is given too), dbias [N] in ``bias_dtype`` where that is. Both are dy's dtype
    or fp32. A result that is not wanted has shape [0]. dz = f'(saved) dy is kept in fp32 as long as a kernel can; sums
    run in a fixed order.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.flop_counter import register_flop_formula

from mpkernels._torch_private.modes import are_transforms_active
from mpkernels._torch_private.ops import unsafe_view
from mpkernels._torch_private.tensors import derives_forward, version_of
from mpkernels.ops import _checks
from mpkernels.ops._autocast import without_autocast
from mpkernels.ops._devices import TILED_TRITON
from mpkernels.ops._registry import define
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
    triton_needs=TILED_TRITON,
)(_reference)


def _check_backward(
    dy: Tensor,
    x: Tensor | None,
    weight: Tensor | None,
    saved: Tensor,
    activation: str,
    weight_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
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
    dz_beside: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Differentiable itself. ``dz_beside`` is a gradient that reaches z another way."""
    compute = torch.promote_types(dy.dtype, torch.float32)
    dx, dweight, dbias = (dy.new_empty(0) for _ in range(3))
    with without_autocast(dy):
        dz = ACTIVATIONS[activation].backward(dy.to(compute), saved.to(compute))
        if dz_beside is not None:
            dz = dz + dz_beside.to(compute)
        if weight is not None:
            dx = (dz @ weight.to(compute)).to(dy.dtype)
        if weight_dtype is not None and x is not None:
            dweight = (dz.t() @ x.to(compute)).to(weight_dtype)
        if bias_dtype is not None:
            dbias = dz.sum(0).to(bias_dtype)
    return dx, dweight, dbias


_linear_act_backward = define(
    "linear_act_backward(Tensor dy, Tensor? x, Tensor? weight, Tensor saved, str activation, "
    "ScalarType? weight_dtype, ScalarType? bias_dtype) -> (Tensor, Tensor, Tensor)",
    check=_check_backward,
    triton_needs=TILED_TRITON,
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


def _compute(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, save: bool, kernel: str, shape: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    if x.dtype != torch.float64:
        y, saved = _linear_act.by(kernel)(x, weight, bias, activation, save)
    else:
        if not torch.compiler.is_compiling():
            _check(x, weight, bias, activation, save)
        y, saved = _reference(x, weight, bias, activation, save)
    # No view, which autograd would not let be changed in place; and before y is saved, to see it changed.
    return y if y.shape == shape else unsafe_view(y, shape), saved


def grad_dtype(parameter: Tensor) -> torch.dtype:
    """``parameter.grad_dtype = torch.float32`` asks for fp32 of a 16-bit parameter; autograd makes other widths."""
    if parameter.dtype == torch.float32:
        return torch.float32
    if torch.compiler.is_compiling() or are_transforms_active() or not parameter.is_leaf:
        return parameter.dtype
    return torch.float32 if parameter.grad_dtype == torch.float32 else parameter.dtype


class _LinearAct(torch.autograd.Function):
    """``cast_*``: weight and bias in x's dtype, where theirs is fp32. Their gradients never pass through 16 bits.

    z, where it is saved, is a second result: a second backward finds its way to x, weight and bias through it.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        cast_weight: Tensor | None,
        cast_bias: Tensor | None,
        activation: str,
        save: bool,
        kernel: str,
        shape: tuple[int, ...],
    ) -> tuple[Tensor, Tensor]:
        if cast_weight is not None:
            weight, bias = cast_weight, cast_bias
        return _compute(x, weight, bias, activation, save, kernel, shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, weight, bias, cast_weight, _, ctx.activation, _, ctx.kernel, shape = inputs
        y, saved = output
        x_needed, weight_needed, bias_needed, *_ = ctx.needs_input_grad
        ctx.set_materialize_grads(False)
        matrix = x.shape[0], weight.shape[0]
        ctx.matrix = None if shape == matrix else matrix  # a 3-D x with a 1-D weight makes a y of two dimensions, too
        ctx.save_for_backward(
            x if weight_needed else None,
            (weight if cast_weight is None else cast_weight) if x_needed else None,
            y if ACTIVATIONS[ctx.activation].saves == "y" else saved,
        )
        ctx.weight_dtype = grad_dtype(weight) if weight_needed else None
        ctx.bias_dtype = grad_dtype(bias) if bias_needed else None
        ctx.fp32_weight = None if cast_weight is None or weight.is_inference() else (weight, version_of(weight))

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, grad_of_saved: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight, saved = ctx.saved_tensors
        activation, weight_dtype, bias_dtype = ctx.activation, ctx.weight_dtype, ctx.bias_dtype
        saves, is_compiling = ACTIVATIONS[activation].saves, torch.compiler.is_compiling()
        if is_compiling or saves != "z":
            grad_of_saved = None  # zeros of torch.compile's, which knows no second backward
        if dy is None:
            if grad_of_saved is None:
                return (None,) * 9
            dy = torch.zeros_like(grad_of_saved)
        elif ctx.matrix is not None:
            dy = dy.reshape(ctx.matrix)
        if ctx.matrix is not None and saves == "y":
            saved = saved.reshape(ctx.matrix)
        if grad_of_saved is None and dy.dtype != torch.float64 and (is_compiling or not torch.is_grad_enabled()):
            backward = _linear_act_backward.by(ctx.kernel)
            results = backward(dy, x, weight, saved, activation, weight_dtype, bias_dtype)
        else:
            if weight is not None and ctx.fp32_weight is not None:
                weight = unchanged("linear_act", *ctx.fp32_weight).to(weight.dtype)
            results = _reference_backward(dy, x, weight, saved, activation, weight_dtype, bias_dtype, grad_of_saved)
        dx, dweight, dbias = results
        return (
            None if weight is None else dx,
            None if weight_dtype is None else dweight,
            None if bias_dtype is None else dbias,
            *(None,) * 6,
        )


# What _LinearAct.apply comes to where no transform is active, but for forward's signature, which it looks up each time:
# that takes longer than both kernels of a small layer.
_apply = super(torch.autograd.Function, _LinearAct).apply


def unchanged(op: str, weight: Tensor, version: object) -> Tensor:
    if version_of(weight) != version:
        raise RuntimeError(f"{op}: a weight was modified in place before a second backward that needs its old value")
    return weight


def linear_act(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    shape: tuple[int, ...],
    cast: tuple[Tensor, Tensor | None] | None = None,
    kernel: str = "dispatched",
) -> Tensor:
    """``f(x W^T + b)`` of matrices in one dtype, in the ``shape`` that is wanted, differentiable as often as you like;
    see mpkernels.functional.

    ``cast`` is weight and bias in x's dtype, where their own is fp32; ``kernel`` as ``Op.by`` takes it.
    """
    transforms = are_transforms_active()
    save = transforms or (
        torch.is_grad_enabled()
        and (weight.requires_grad or x.requires_grad or (bias is not None and bias.requires_grad))
    )
    cast_weight, cast_bias = cast or (None, None)
    if not (save or derives_forward()):
        if cast_weight is not None:
            weight, bias = cast_weight, cast_bias
        return _compute(x, weight, bias, activation, save, kernel, shape)[0]
    apply: Any = _LinearAct.apply if transforms or torch.compiler.is_compiling() else _apply
    y: Tensor = apply(x, weight, bias, cast_weight, cast_bias, activation, save, kernel, shape)[0]
    return y
