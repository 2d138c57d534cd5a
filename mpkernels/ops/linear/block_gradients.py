"""The gradients of a linear block: by its kernels, or by torch's functions, where they are differentiated once more."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from mpkernels._torch_private.tensors import sum_of_versions
from mpkernels.ops.linear.activations import ACTIVATIONS
from mpkernels.ops.linear.block_kind import Kind, Ops, Parameters, begin, grad_dtype, lies_by_columns
from mpkernels.ops.linear.linear_act import weight_gradient
from mpkernels.ops.linear.linear_gated import gradients

Gradients = tuple[Tensor | None, ...]  #: of x and of each of the Parameters, or of x and of the first two
_LayerGradients = tuple[Tensor | None, Tensor | None, Tensor | None]  # of x, weight and bias


class Wanted(NamedTuple):
    """Which gradients of a layer are wanted."""

    weight: torch.dtype | None  #: the gradient's dtype, or None if it isn't wanted
    bias: torch.dtype | None
    by_columns: bool  #: whether the weight's gradient lies by columns


def wanted_of(weight: Any, bias: Any, wants_weight: bool, wants_bias: bool, rounded_to: torch.dtype | None) -> Wanted:
    """Return which gradients of a layer are wanted. The weight's has the dtype ``rounded_to``, if that is given."""
    dtype = (rounded_to or grad_dtype(weight)) if wants_weight else None
    return Wanted(dtype, grad_dtype(bias) if wants_bias else None, wants_weight and lies_by_columns(weight))


class Call(NamedTuple):
    """What a block does, besides what its tensors hold."""

    kind: Kind
    ops: Ops
    matrix: tuple[int, int]  #: y's shape as a matrix
    shape: tuple[int, ...]  #: in which y was returned
    has_out: bool
    wants_x: bool
    layers: tuple[Wanted, ...]  #: of the first layer alone, or also of the gate's other factor and of the last layer
    keeps: Literal["z", "h", ""]  #: what the backward needs of the forward; h of a lone layer is y
    is_large: bool = False  #: whether a lone layer's backward is worth two ops, to free what it kept after the first
    nothing: Tensor | None = None  #: an empty tensor of the products' dtype, if it may be kept
    x_shape: tuple[int, ...] | None = None  #: None if x is a matrix

    @property
    def is_lone(self) -> bool:
        """Return whether there is but one layer."""
        return not (self.kind.is_gated or self.has_out)


class Fp32(NamedTuple):
    """The parameters that were cast, which a second backward needs. They aren't saved, because they may be stepped
    before the first one."""

    parameters: Sequence[Tensor | None]
    versions: object  #: the sum


def keeps(kind: Kind, has_out: bool) -> Literal["z", "h", ""]:
    """Return what the backward needs of a block's forward."""
    saves = "z" if kind.is_gated else ACTIVATIONS[kind.activation].saves
    return "z" if saves == "z" else "h" if has_out or saves == "y" else ""


def by_kernels(call: Call, dy: Tensor, saved: list[Any]) -> Gradients:
    """Return all gradients that are wanted. ``saved`` has x, the Parameters (those of one layer, if that was given
    alone), what was kept (z or h) and the dropout's mask; None for what isn't needed. The list is emptied, so that each
    tensor is freed after its last use."""
    if call.kind.is_gated:
        return _of_gated(call, dy, saved)
    if call.has_out:
        return _of_mlp(call, dy, saved)
    x, weight, *_, kept, _ = saved
    saved.clear()
    wanted, *others = call.layers
    activation = call.kind.activation
    of_bias = None
    if call.is_large:
        dy, of_bias, _ = call.ops.dact(dy, None, kept, activation, wanted.bias, False)
        kept, activation, wanted = None, "none", wanted._replace(bias=None)
    dx, dweight, dbias = _of_layer(call, wanted, dy, x, weight, kept, activation)
    dbias = of_bias if call.is_large and call.layers[0].bias else dbias
    return (dx, dweight, dbias, None, None, None, None) if others else (dx, dweight, dbias)


def _of_layer(
    call: Call, wanted: Wanted, dz: Tensor, x: Any, weight: Any, kept: Tensor | None = None, activation: str = "none"
) -> _LayerGradients:
    """Return the gradients of one layer. ``dz`` is the gradient of what the activation returns. The weight is given if
    x's gradient is wanted."""
    dtype, bias_dtype, by_columns = wanted
    if weight is None and dtype is None and bias_dtype is None:
        return None, None, None
    kept = (call.nothing if call.nothing is not None else dz.new_empty(0)) if kept is None else kept
    x = None if dtype is None else x
    dx, dweight, dbias = call.ops.act_backward(dz, x, weight, kept, activation, dtype, bias_dtype, by_columns)
    return (
        None if weight is None else dx,
        None if dtype is None else dweight,
        None if bias_dtype is None else dbias,
    )


def _of_mlp(call: Call, dy: Tensor, saved: list[Any]) -> Gradients:
    x, weight, bias, _, _, out_weight, _, kept, mask = saved
    saved.clear()
    kind, (first, _, last) = call.kind, call.layers
    if kind.recompute:
        kept = begin(kind, call.ops, x, True, weight, bias)[call.keeps == "z"]
    known = dy.new_empty(0) if kind.activation == "none" else kept
    bias_dtype = first.bias if mask is None else None
    dz, dbias, h = call.ops.dact(dy, out_weight, known, kind.activation, bias_dtype, last.weight is not None)
    h = h if call.keeps == "z" else kept
    del kept, known, out_weight
    if mask is not None:
        dz = _dropped(dz, mask, kind)
        h = _dropped(h, mask, kind) if last.weight is not None else h
    _, *of_last = _of_layer(call, last, dy, h, None)
    del h
    first = first if bias_dtype is None else first._replace(bias=None)
    dx, dweight, sums = _of_layer(call, first, dz, x, weight if call.wants_x else None)
    return dx, dweight, sums if bias_dtype is None else dbias, None, None, *of_last


def _of_gated(call: Call, dy: Tensor, saved: list[Any]) -> Gradients:
    x, weight, bias, up_weight, up_bias, out_weight, _, z, mask = saved
    saved.clear()
    kind, (first, up, last) = call.kind, call.layers
    if kind.recompute:
        z = begin(kind, call.ops, x, True, weight, bias, up_weight, up_bias)[1]
    dz, h = call.ops.dgated(dy, out_weight, z, kind.activation, last.weight is not None)
    del z, out_weight
    if mask is not None:
        dz = _dropped(dz.view(len(mask), 2, -1), mask.unsqueeze(1), kind).view(dz.shape)
        h = _dropped(h, mask, kind) if last.weight is not None else h
    _, *of_last = _of_layer(call, last, dy, h, None)
    del h
    weight, up_weight = (weight, up_weight) if call.wants_x else (None, None)
    if kind.is_stacked:
        return *_of_layer(call, first, dz, x, weight), None, None, *of_last
    dgate, dup = dz.chunk(2, 1)
    dx, *of_gate = _of_layer(call, first, dgate, x, weight)
    more, *of_up = _of_layer(call, up, dup, x, up_weight)
    return dx if dx is None or more is None else dx.add_(more), *of_gate, *of_up, *of_last


def _dropped(value: Tensor, mask: Tensor, kind: Kind) -> Tensor:
    return value * mask * (0.0 if kind.dropout == 1 else 1 / (1 - kind.dropout))


def by_torch(call: Call, dy: Tensor, saved: list[Any], grad_of_kept: Tensor | None, fp32: Fp32 | None) -> Gradients:
    """Return all gradients that are wanted, themselves differentiable. ``saved`` is what ``by_kernels`` takes,
    ``grad_of_kept`` the gradient of the kept z or h, which a second backward brings."""
    saved_x, *params, kept, mask = saved
    kind, compute = call.kind, torch.promote_types(dy.dtype, torch.float32)
    weight, bias, up_weight, up_bias, out_weight, _ = Parameters(
        *(None if it is None else it.to(compute) for it in _differentiable(call, params, fp32))
    )
    x, wide_dy = None if saved_x is None else saved_x.to(compute), dy.to(compute)
    z = wide_dy if kept is None else kept.to(compute)
    if kind.recompute and x is not None:
        z = functional.linear(x, weight, bias)
        z = z if up_weight is None else torch.cat((z, functional.linear(x, up_weight, up_bias)), 1)
    dh = wide_dy if out_weight is None else wide_dy @ out_weight
    dh = dh if mask is None else _dropped(dh, mask, kind)
    forward, backward, saves = ACTIVATIONS[kind.activation]
    if kind.is_gated:
        gate, up = z.chunk(2, 1)
        *slopes, h = gradients(dh, gate, up, kind.activation)
        dz = torch.cat(slopes, 1)
    else:
        h = forward(z) if kind.keeps_z or kind.recompute else z
        dh = dh if grad_of_kept is None or kind.keeps_z else dh + grad_of_kept.to(compute)
        dz = backward(dh, z if saves == "z" else h)
    if grad_of_kept is not None and kind.keeps_z:
        dz = dz + grad_of_kept.to(compute)
    h = h if mask is None else _dropped(h, mask, kind)
    weights = weight if up_weight is None or weight is None else torch.cat((weight, up_weight))
    dx = (dz @ weights).to(dy.dtype) if call.wants_x else None
    dgate, dup = dz.chunk(2, 1) if kind.is_gated and not kind.is_stacked else (dz, dz)
    inputs: tuple[tuple[Tensor, Any], ...] = (dgate, x), (dup, x), (wide_dy, h)
    of_layers = (_layer_by_torch(wanted, *it) for wanted, it in zip(call.layers, inputs, strict=False))
    return dx, *(gradient for layer in of_layers for gradient in layer)


def _layer_by_torch(wanted: Wanted, dz: Tensor, x: Any) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of a layer's weight and bias."""
    dweight = None if wanted.weight is None else weight_gradient(dz, x, wanted.by_columns).to(wanted.weight)
    return dweight, None if wanted.bias is None else dz.sum(0).to(wanted.bias)


def _differentiable(call: Call, params: Sequence[Any], fp32: Fp32 | None) -> Parameters:
    """Return the parameters. Those that were cast are cast again, so that their gradients are known."""
    if fp32 is None:
        return Parameters(*params)
    if sum_of_versions(fp32.parameters) != fp32.versions:
        op = call.kind.op
        raise RuntimeError(f"{op}: a weight was modified in place before a second backward that needs its old value")
    pairs = zip(params, fp32.parameters, strict=True)
    return Parameters(*(it if it is None or mine is None else mine.to(it.dtype) for it, mine in pairs))
