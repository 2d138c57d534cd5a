"""Whether an optimizer's grads hold an inf or NaN, told on the device of the scale."""

from collections.abc import Iterator
from itertools import chain

import torch
from torch import Tensor
from torch.optim import Optimizer

from mpkernels.ops import grad_stats
from mpkernels.ops import unscale_ as unscale_list_

FoundInf = dict[torch.device, Tensor]  # fp32, 0-dim, 0 or 1; one at most, as torch's optimizers take any other for 0


Grads = dict[torch.device, tuple[list[Tensor], list[Tensor]]]  # parameters and their grads


def unscale_(grads: Grads, inv_scale: Tensor) -> FoundInf:
    """Whether they do once they are unscaled, which they are then."""
    found_infs = []
    for device, (_, of_device) in grads.items():
        found_infs.append(torch.zeros((), dtype=torch.float32, device=device))
        unscale_list_(of_device, found_infs[-1], inv_scale.to(device, non_blocking=True))
    return _together(found_infs, inv_scale.device)


def look(grads: Grads, scale: Tensor) -> FoundInf:
    """Whether they will once they are unscaled: finite ones overflow, too, where a scale below 1 is taken off them.
    Their norm is then beyond fp32."""
    found_infs = []
    for device, (_, of_device) in grads.items():
        stats = grad_stats(of_device)
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


def grads_of(optimizer: Optimizer) -> Grads:
    """Of a sparse one, the values."""
    grads: Grads = {}
    for param in _params(optimizer):
        if param.grad is None:
            continue
        if param.grad.is_sparse and param.grad.dtype is torch.float16:
            param.grad = param.grad.coalesce()  # or the sum of an index's values might overflow later, unseen
        grad = param.grad._values() if param.grad.is_sparse else param.grad
        params, of_params = grads.setdefault(grad.device, ([], []))
        params.append(param)
        of_params.append(grad)
    return grads
