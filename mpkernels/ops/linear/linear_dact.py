"""linear_dact: the backward of a linear layer and of the activation before it, in one op.

It computes in fp32 and rounds each result once, where a kernel can. Only the reference computes fp64; kernels refuse
it. For kernels:

``linear_dact(dy, weight, saved, activation, bias_dtype, wants_h) -> (dz, dbias, h)``
    dy [M, N] and weight [N, K], or dy [M, K] and None: the gradient of what the activation returned. saved [M, K] as
    ACTIVATIONS[activation].saves says: z or y of the layer before, or [0]. One dtype of fp16, bf16, fp32, any strides,
    any size down to 0. dz = f'(saved) (dy weight) is [M, K], contiguous, in dy's dtype. dbias, [K], is the sum of dz's
    rows before they are rounded, in ``bias_dtype``: dy's dtype or fp32. If ``bias_dtype`` is None, dbias isn't wanted,
    and has shape [0]. Sums run in a fixed order. If ``wants_h`` and saved is z, h = f(z) is [M, K], contiguous, in dy's
    dtype; else it has shape [0]. No result may share memory with an argument.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from mpkernels.ops import _checks
from mpkernels.ops._autocast import without_autocast
from mpkernels.ops._registry import define
from mpkernels.ops.linear import TRITON
from mpkernels.ops.linear.activations import ACTIVATIONS, check_activation


def _check(
    dy: Tensor, weight: Tensor | None, saved: Tensor, activation: str, bias_dtype: torch.dtype | None, wants_h: bool
) -> None:
    op = "linear_dact"
    check_activation(op, activation)
    _checks.matrix(op, "dy", dy, None, None)
    if weight is not None:
        _checks.matrix(op, "weight", weight, (dy.shape[1], None), dy)
    shape = (dy.shape[0], (dy if weight is None else weight).shape[1]) if ACTIVATIONS[activation].saves else (0,)
    _checks.matrix(op, "saved", saved, shape, dy)
    _checks.gradient_dtype(op, "bias_dtype", bias_dtype, dy)


def _reference(
    dy: Tensor, weight: Tensor | None, saved: Tensor, activation: str, bias_dtype: torch.dtype | None, wants_h: bool
) -> tuple[Tensor, Tensor, Tensor]:
    forward, backward, saves = ACTIVATIONS[activation]
    compute = torch.promote_types(dy.dtype, torch.float32)
    with without_autocast(dy):
        known = saved.to(compute)
        dh = dy.to(compute) if weight is None else dy.to(compute) @ weight.to(compute)
        dz = backward(dh, known)
        dbias = dy.new_empty(0) if bias_dtype is None else dz.sum(0).to(bias_dtype)
        h = forward(known) if wants_h and saves == "z" else dy.new_empty(0)
    return dz.to(dy.dtype).contiguous(), dbias, h.to(dy.dtype).contiguous()


_linear_dact = define(
    "linear_dact(Tensor dy, Tensor? weight, Tensor saved, str activation, ScalarType? bias_dtype, bool wants_h) "
    "-> (Tensor, Tensor, Tensor)",
    check=_check,
    triton_module=TRITON,
)(_reference)


@register_flop_formula(_linear_dact.overload.overloadpacket)
def _flops(dy: torch.Size, weight: torch.Size | None, *_: Any, **__: Any) -> int:
    return 0 if weight is None else 2 * dy.numel() * weight[1]


def linear_dact(
    dy: Tensor, weight: Tensor | None, saved: Tensor, activation: str, bias_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    """Return ``dz = f'(saved) (dy @ weight)`` and the sums of its columns: the gradients of z in
    ``linear(f(z), weight)``, and of the bias that was added to z.

    ``dy`` is the gradient of the linear layer's output, or of ``f(z)`` if ``weight`` is None. ``saved`` is what the
    activation's backward needs: z for relu2, gelu, gelu_tanh and silu; y for relu, sigmoid and tanh; for none an empty
    tensor. They are matrices in one dtype, which dz has, too. The sums are those of dz before it is rounded, in
    ``bias_dtype``: that dtype or fp32; None makes them an empty tensor. Neither result carries a gradient.
    """
    computes_alone = isinstance(dy, Tensor) and dy.dtype == torch.float64
    dz, dbias, _ = (_linear_dact.reference if computes_alone else _linear_dact)(
        dy, weight, saved, activation, bias_dtype, False
    )
    return dz, dbias
