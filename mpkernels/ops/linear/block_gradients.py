"""The gradients of a linear block: by its kernels, or by torch's functions, where they are differentiated once more."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from mpkernels._torch_private.tensors import version_of
from mpkernels.ops.linear.activations import ACTIVATIONS
from mpkernels.ops.linear.block_kind import Kind, Parameters, begin
from mpkernels.ops.linear.linear_act import _linear_act_backward, weight_gradient
from mpkernels.ops.linear.linear_dact import _linear_dact
from mpkernels.ops.linear.linear_gated import _linear_dgated, gradients

Gradients = tuple[Tensor | None, ...]  #: of x and of each of the Parameters, or of x and of the first two
_LayerGradients = tuple[Tensor | None, Tensor | None, Tensor | None]  # of x, weight and bias
_NO_GRADIENTS_OF_LATER_LAYERS = None, None, None, None  # of the layers besides the first


class Wanted(NamedTuple):
    """Which gradients of a layer are wanted."""

    weight: torch.dtype | None  #: the gradient's dtype, or None if it isn't wanted
    bias: torch.dtype | None
    by_columns: bool  #: whether the weight's gradient lies by columns


class Call(NamedTuple):
    """What a backward has to know, besides tensors."""

    kind: Kind
    kernel: str
    matrix: tuple[int, int]  #: y's shape as a matrix
    shape: tuple[int, ...]  #: in which y was returned
    has_out: bool
    wants_x: bool
    layers: tuple[Wanted, ...]  #: of the first layer alone, or also of the gate's other factor and of the last layer
    fp32: list[tuple[Tensor, object] | None] | None  #: the parameters that were cast, and their versions

    @property
    def is_lone(self) -> bool:
        """Return whether there is but one layer."""
        return not (self.kind.is_gated or self.has_out)


class Saved(NamedTuple):
    """The tensors that a backward finds; None for those that it doesn't need."""

    x: Any
    params: Parameters
    kept: Any  #: z or h
    mask: Any  #: of the dropout


def by_kernels(call: Call, dy: Tensor, saved: Saved) -> Gradients:
    """Return all gradients that are wanted."""
    if not call.is_lone:
        dz, dbias, *of_last = _last_layer_by_kernels(call, dy, saved)
        return *_first_layers_by_kernels(call, dz, dbias, saved), *of_last
    kept = dy.new_empty(0) if saved.kept is None else saved.kept
    of_first = _layer_by_kernels(
        call, call.layers[0], dy, saved.x, saved.params.weight, kept, call.kind.activation, call.wants_x
    )
    return of_first if len(call.layers) == 1 else (*of_first, *_NO_GRADIENTS_OF_LATER_LAYERS)


def _layer_by_kernels(
    call: Call, wanted: Wanted, dz: Tensor, x: Any, weight: Any, kept: Tensor, activation: str, wants_x: bool
) -> _LayerGradients:
    """Return the gradients of one layer. ``dz`` is the gradient of what the activation returns."""
    wants_weight, wants_bias = wanted.weight is not None, wanted.bias is not None
    if not (wants_x or wants_weight or wants_bias):
        return None, None, None
    dx, dweight, dbias = _linear_act_backward.by(call.kernel)(
        dz, x if wants_weight else None, weight if wants_x else None, kept, activation,
        wanted.weight, wanted.bias, wanted.by_columns,
    )  # fmt: skip
    return dx if wants_x else None, dweight if wants_weight else None, dbias if wants_bias else None


def _last_layer_by_kernels(
    call: Call, dy: Tensor, saved: Saved
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of z, of its bias (if a kernel has summed it up), and of the last layer's parameters."""
    kind, kept, nothing = call.kind, saved.kept, dy.new_empty(0)
    first, _, last = call.layers
    if kind.recompute:
        h, z = begin(kind, saved.x, call.kernel, True, *saved.params)
        kept = z if kind.keeps_z else h
    wants_h, dbias = last.weight is not None, None
    if kind.is_gated:
        dz, h = _linear_dgated.by(call.kernel)(dy, saved.params.out_weight, kept, kind.activation, wants_h)
    else:
        bias_dtype = first.bias if saved.mask is None else None
        dz, sums, anew = _linear_dact.by(call.kernel)(
            dy, saved.params.out_weight, kept if ACTIVATIONS[kind.activation].saves else nothing, kind.activation,
            bias_dtype, wants_h,
        )  # fmt: skip
        dbias = None if bias_dtype is None else sums
        h = anew if kind.keeps_z else kept
    if saved.mask is not None:
        h = _dropped(h, saved.mask, kind) if wants_h else h
        dz = _dropped(dz.view(len(saved.mask), -1, saved.mask.shape[1]), saved.mask.unsqueeze(1), kind).view(dz.shape)
    return dz, dbias, *_layer_by_kernels(call, last, dy, h, None, nothing, "none", wants_x=False)[1:]


def _first_layers_by_kernels(call: Call, dz: Tensor, dbias: Tensor | None, saved: Saved) -> Gradients:
    """Return the gradients of x and of the layers before the last."""
    (first, up, _), x, nothing = call.layers, saved.x, dz.new_empty(0)
    weight, up_weight = saved.params.weight, saved.params.up_weight
    if not call.kind.is_gated or call.kind.is_stacked:
        wanted = first if dbias is None else first._replace(bias=None)
        dx, dweight, sums = _layer_by_kernels(call, wanted, dz, x, weight, nothing, "none", call.wants_x)
        return dx, dweight, sums if dbias is None else dbias, None, None
    dgate, dup = dz.chunk(2, 1)
    dx_by_gate, *of_gate = _layer_by_kernels(call, first, dgate, x, weight, nothing, "none", call.wants_x)
    dx_by_up, *of_up = _layer_by_kernels(call, up, dup, x, up_weight, nothing, "none", call.wants_x)
    dx = dx_by_gate if dx_by_gate is None or dx_by_up is None else dx_by_gate + dx_by_up
    return dx, *of_gate, *of_up


def _dropped(value: Tensor, mask: Tensor, kind: Kind) -> Tensor:
    return value * mask * (0.0 if kind.dropout == 1 else 1 / (1 - kind.dropout))


def by_torch(call: Call, dy: Tensor, saved: Saved, grad_of_kept: Tensor | None) -> Gradients:
    """Return all gradients that are wanted, themselves differentiable. ``grad_of_kept`` is the gradient of the kept z
    or h, which a second backward brings."""
    kind, compute, mask = call.kind, torch.promote_types(dy.dtype, torch.float32), saved.mask
    weight, bias, up_weight, up_bias, out_weight, _ = Parameters(
        *(None if it is None else it.to(compute) for it in _differentiable(call, saved.params))
    )
    x, wide_dy = None if saved.x is None else saved.x.to(compute), dy.to(compute)
    z = wide_dy if saved.kept is None else saved.kept.to(compute)
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


def _differentiable(call: Call, params: Parameters) -> Parameters:
    """Return the parameters, the fp32 ones themselves instead of the saved casts."""
    if call.fp32 is None:
        return params
    pairs = zip(params, call.fp32, strict=False)  # a lone layer has two
    return Parameters(
        *(it if it is None or mine is None else _unchanged(call.kind.op, *mine).to(it.dtype) for it, mine in pairs)
    )


def _unchanged(op: str, weight: Tensor, version: object) -> Tensor:
    if version_of(weight) != version:
        raise RuntimeError(f"{op}: a weight was modified in place before a second backward that needs its old value")
    return weight
