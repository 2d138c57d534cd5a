"""linear_gated: h = f(x Wg^T + bg) * (x Wu^T + bu), as in SwiGLU; and linear_dgated, where its backward begins.

Both compute in fp32 and round each result once, where a kernel can. Kernels refuse fp64; the reference takes it.
gate and up lie side by side, in one matrix of twice N columns: z holds both, dz their gradients. For kernels:

``linear_gated(x, gate_weight, up_weight, gate_bias, up_bias, activation, save) -> (h, z)``
    x [M, K], both weights [N, K], both biases [N] or None: one dtype of fp16, bf16, fp32, any strides, any size down
    to 0. The weights may be halves of one matrix. h is [M, N], contiguous. z is [M, 2N], contiguous, if ``save``; else
    it has shape [0]. Neither may share memory with an argument or with the other.
``linear_dgated(dy, weight, z, activation, wants_h) -> (dz, h)``
    z [M, 2N]; dy [M, L] and weight [L, N] of the layer that takes h, or dy [M, N] and None: the gradient of h itself,
    dh. One dtype, any strides, any size. dz, [M, 2N] and contiguous, is the gradient of z; h, [M, N] and contiguous,
    is computed anew if ``wants_h``, else has shape [0].
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


def _check(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    activation: str,
    save: bool,
) -> None:
    op = "linear_gated"
    _checks.matrix(op, "x", x, None, None)
    _checks.matrix(op, "gate_weight", gate_weight, (None, x.shape[1]), x)
    _checks.matrix(op, "up_weight", up_weight, tuple(gate_weight.shape), x)
    for name, bias in (("gate_bias", gate_bias), ("up_bias", up_bias)):
        if bias is not None:
            _checks.matrix(op, name, bias, (gate_weight.shape[0],), x)
    check_activation(op, activation)


def _reference(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    activation: str,
    save: bool,
) -> tuple[Tensor, Tensor]:
    compute = torch.promote_types(x.dtype, torch.float32)
    wide = [None if it is None else it.to(compute) for it in (x, gate_weight, up_weight, gate_bias, up_bias)]
    wide_x, wide_gate, wide_up, *biases = wide
    with without_autocast(x):
        gate = functional.linear(wide_x, wide_gate, biases[0])  # type: ignore[arg-type]
        up = functional.linear(wide_x, wide_up, biases[1])  # type: ignore[arg-type]
    h = ACTIVATIONS[activation].forward(gate) * up
    return h.to(x.dtype), torch.cat((gate, up), 1).to(x.dtype) if save else x.new_empty(0)


_linear_gated = define(
    "linear_gated(Tensor x, Tensor gate_weight, Tensor up_weight, Tensor? gate_bias, Tensor? up_bias, str activation, "
    "bool save) -> (Tensor, Tensor)",
    check=_check,
    triton_module=TRITON,
)(_reference)


def _check_backward(dy: Tensor, weight: Tensor | None, z: Tensor, activation: str, wants_h: bool) -> None:
    op = "linear_dgated"
    check_activation(op, activation)
    _checks.matrix(op, "z", z, None, None)
    rows, both = z.shape
    if both % 2:
        raise ValueError(f"{op}: z must have gate's columns and as many of up, got shape {tuple(z.shape)}")
    _checks.matrix(op, "dy", dy, (rows, both // 2 if weight is None else None), z)
    if weight is not None:
        _checks.matrix(op, "weight", weight, (dy.shape[1], both // 2), z)


def gradients(dh: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of gate and of up, and h. These can be differentiated."""
    forward, backward, saves = ACTIVATIONS[activation]
    opened = forward(gate)
    return backward(dh * up, opened if saves == "y" else gate), dh * opened, opened * up


def _reference_backward(
    dy: Tensor, weight: Tensor | None, z: Tensor, activation: str, wants_h: bool
) -> tuple[Tensor, Tensor]:
    compute = torch.promote_types(dy.dtype, torch.float32)
    with without_autocast(dy):
        dh = dy.to(compute) if weight is None else dy.to(compute) @ weight.to(compute)
        gate, up = z.to(compute).chunk(2, 1)
        dgate, dup, h = gradients(dh, gate, up, activation)
    return torch.cat((dgate, dup), 1).to(dy.dtype), h.to(dy.dtype) if wants_h else dy.new_empty(0)


_linear_dgated = define(
    "linear_dgated(Tensor dy, Tensor? weight, Tensor z, str activation, bool wants_h) -> (Tensor, Tensor)",
    check=_check_backward,
    triton_module=TRITON,
)(_reference_backward)


@register_flop_formula(_linear_gated.overload.overloadpacket)
def _flops(x: torch.Size, gate_weight: torch.Size, *_: Any, **__: Any) -> int:
    """Count the products' flops, as torch counts its own."""
    return 4 * x.numel() * gate_weight[0]


@register_flop_formula(_linear_dgated.overload.overloadpacket)
def _flops_backward(dy: torch.Size, weight: torch.Size | None, *_: Any, **__: Any) -> int:
    return 0 if weight is None else 2 * dy.numel() * weight[1]
