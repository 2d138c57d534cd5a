"""unscale_: divides a list of grads by the loss scale, and reports whether any of them overflowed."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mpkernels.ops import _checks
from mpkernels.ops._registry import define


def _check(grads: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    _checks.scalar("unscale_", "found_inf", found_inf)
    _checks.scalar("unscale_", "inv_scale", inv_scale, like=found_inf)
    _checks.tensors("unscale_", "grads", grads, device=found_inf.device, writable=True)


@define("unscale_(Tensor(a!)[] grads, Tensor(b!) found_inf, Tensor inv_scale) -> ()", check=_check)
def _unscale(grads: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    for grad in grads:
        compute_dtype = torch.promote_types(grad.dtype, torch.float32)
        grad.copy_(grad.to(compute_dtype) * inv_scale.to(compute_dtype).reshape(()))
        bad = grad.isfinite().logical_not().any()
        found_inf.masked_fill_(bad, 1.0)


def unscale_(grads: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """Multiply every grad by ``inv_scale`` in place, and set ``found_inf`` to 1 where a result is inf or NaN.

    This does what ``torch.amp.GradScaler.unscale_`` does, with two differences: fp16 and bf16 grads are welcome
    everywhere, and a finite grad that overflows when it is unscaled (a scale below 1) is found too. 16-bit grads are
    multiplied in fp32 and rounded once. One launch serves any number of tensors; nothing is copied to the host.
    Autograd records nothing, as if under ``torch.no_grad()``.

    Args:
        grads: dense tensors on one device, in fp16, bf16, fp32 or fp64, mixed as they come; empty ones are welcome.
            No two may share memory: which of them is unscaled first is not defined.
        found_inf: one fp32, on the same device. Left alone if all is finite.
        inv_scale: one fp32, on the same device.
    """
    _unscale(grads, found_inf, inv_scale)
