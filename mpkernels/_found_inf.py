"""Whether an optimizer's grads hold an inf or NaN, told on the device of the scale."""

from collections.abc import Iterator
from itertools import chain

import torch
from torch import Tensor
from torch.optim import Optimizer

from mpkernels.ops import grad_stats
from mpkernels.ops import unscale_ as unscale_list_

FoundInf = dict[torch.device, Tensor]  # fp32, 0-dim, 0 or 1; one at most, as torch's optimizers take any other for 0


def unscale_(optimizer: Optimizer, inv_scale: Tensor) -> FoundInf:
    """Whether they do once they are unscaled, which they are then."""
    found_infs = []
    for device, grads in _grads_by_device(optimizer).items():
        found_infs.append(torch.zeros((), dtype=torch.float32, device=device))
        unscale_list_(grads, found_infs[-1], inv_scale.to(device, non_blocking=True))
    return _together(found_infs, inv_scale.device)


def look(optimizer: Optimizer, scale: Tensor) -> FoundInf:
    """Whether they will once they are unscaled: finite ones overflow, too, where a scale below 1 is taken off them.
    Their norm is then beyond fp32."""
    found_infs = []
    for device, grads in _grads_by_device(optimizer).items():
        stats = grad_stats(grads)
        norm = stats.total_sumsq.sqrt() / scale.to(device, non_blocking=True)
        found_infs.append(torch.maximum(stats.found_inf, (norm > torch.finfo(torch.float32).max).float()))
    return _together(found_infs, scale.device)


def _together(found_infs: list[Tensor], device: torch.device) -> FoundInf:
    there = [found_inf.to(device, non_blocking=True) for found_inf in found_infs]
    return {device: there[0] if len(there) == 1 else torch.stack(there).amax()} if there else {}


def first_device(optimizer: Optimizer) -> torch.device | None:
    """Of the first grad, if there is one."""
    return next((param.grad.device for param in _params(optimizer) if param.grad is not None), None)


def _params(optimizer: Optimizer) -> Iterator[Tensor]:
    return chain.from_iterable(group["params"] for group in optimizer.param_groups)


def _grads_by_device(optimizer: Optimizer) -> dict[torch.device, list[Tensor]]:
    """Of a sparse one, the values."""
    grads: dict[torch.device, list[Tensor]] = {}
    for param in _params(optimizer):
        if param.grad is None:
            continue
        if param.grad.is_sparse and param.grad.dtype is torch.float16:
            param.grad = param.grad.coalesce()  # or the sum of an index's values might overflow later, unseen
        grad = param.grad._values() if param.grad.is_sparse else param.grad
        grads.setdefault(grad.device, []).append(grad)
    return grads
