"""Finds out whether an optimizer's grads hold an inf or NaN. The answer stays on the device of the scale."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from mpkernels._shared.parameters import by_device, params_of, put_on, real_memory, unwrapped
from mpkernels._torch_private.tensors import values_of
from mpkernels.amp.retries import Attempt
from mpkernels.distributed import fsdp1, shares
from mpkernels.distributed.parts import parts_of, settled_grads
from mpkernels.distributed.processes import Processes
from mpkernels.ops import grad_stats
from mpkernels.ops import unscale_ as unscale_list_
from mpkernels.optim import torchao_offload
from mpkernels.optim.offload import has_grads_on_host

FoundInf = dict[torch.device, Tensor]  # at most one tensor: fp32, 0-dim, exactly 0 or 1, as torch's optimizers want
Grads = dict[torch.device, tuple[list[Tensor], list[Tensor]]]  # device -> parameters and their grads


def unscale_(grads: Grads, inv_scale: Tensor, attempts: dict[torch.device, Attempt]) -> FoundInf:
    """Unscale the grads in place, and return whether any of them is inf or NaN afterwards. Leave out devices whose
    grads an earlier, failed attempt has already unscaled."""
    for device, (params, grads_there) in grads.items():
        if device not in attempts or not attempts[device].was_done():
            attempt = attempts[device] = Attempt(partial(list, params), device)
            unscale = partial(_unscale, attempt, put_on(device, inv_scale))
            try:
                unscale(grads_there)
            except (RuntimeError, TypeError):
                if not any(it.is_complex() or it.is_neg() for it in grads_there):
                    raise
                as_users_have_them = list(grads_there)
                grads_there[:] = map(real_memory, grads_there)  # also for who reports on them
                unscale(grads_there)
                increment_version(as_users_have_them)
    return _together([attempts[device].found_inf for device in grads], inv_scale.device)


def _unscale(attempt: Attempt, inv_scale: Tensor, grads: list[Tensor]) -> None:
    unscale_list_([*grads, attempt.mark], attempt.found_inf, inv_scale)


def find_inf(grads: Grads, scale: Tensor) -> FoundInf:
    """Return whether the grads will hold an inf or NaN once they are unscaled. A scale below 1 enlarges them, so finite
    grads count as well if their unscaled norm is too large for fp32, or NaN: a scale of 0 makes NaN of grads of 0."""
    found_infs = []
    for device, (_, grads_there) in grads.items():
        stats = grad_stats(grads_there)
        norm = stats.total_sumsq.sqrt() / put_on(device, scale)
        found_infs.append(torch.maximum(stats.found_inf, (~(norm <= torch.finfo(torch.float32).max)).float()))
    return _together(found_infs, scale.device)


def _together(found_infs: list[Tensor], device: torch.device) -> FoundInf:
    flags = [put_on(device, found_inf) for found_inf in found_infs]
    return {device: flags[0] if len(flags) == 1 else torch.stack(flags).amax()} if flags else {}


def given_peers(scaler: Any, optimizer: Any) -> Processes | None:
    """Return the processes of the process_group that the user gave to the scaler or to the optimizer."""
    values = [getattr(it, "_peers", None) for it in (scaler, unwrapped(optimizer))]
    # Other libraries' classes may return anything for this name.
    scalers, optimizers = (value if isinstance(value, Processes) else None for value in values)
    if scalers is not None and optimizers is not None and scalers.group is not optimizers.group:
        raise ValueError("GradScaler: process_group must be that of the optimizer, got another one")
    return scalers or optimizers


def given_group(scaler: Any, optimizer: Any) -> Any:
    peers = given_peers(scaler, optimizer)
    return None if peers is None else peers.group


def peers_of(scaler: Any, optimizer: Optimizer) -> Processes | None:
    """Return the processes that skip the optimizer's steps together."""
    params = params_of(optimizer)
    return given_peers(scaler, optimizer) or shares.peers_of(params) or fsdp1.peers_of("GradScaler", params)


def found_by_all(
    processes: Processes | None, find: Callable[[], FoundInf], scale: Tensor, step_asks: bool = False
) -> FoundInf:
    """Return whether the grads of any process hold an inf or NaN. If the step will ask the others, only this process's
    grads count here. If one process fails, all raise; on a GPU, where no host waits, the others skip the step."""
    if processes is None:
        return find()
    try:
        found_infs = find()
    except Exception:
        processes.agree([scale], None, None, has_failed=True)
        raise
    if step_asks:
        return found_infs
    _, found_inf, failed, _ = processes.agree([scale], None, sum(found_infs.values()))
    processes.refuse_if_failed("GradScaler: the look at the grads", failed)
    return {found_inf.device: found_inf}


def grads_of(optimizer: Optimizer) -> Grads:
    """Return each device's parameters that have a grad, and their grads; a sparse grad is represented by its values."""
    torchao_offload.refuse_scaler(optimizer)
    if has_grads_on_host(optimizer):
        raise RuntimeError(
            "GradScaler: grads must be on their parameters' device to be unscaled before the step, got some that "
            "release_grads has sent to the host; leave unscale_ and step hooks out, and clip by max_norm"
        )
    params = [param for param in params_of(optimizer) if param.grad is not None]
    grads = [_values(param, grad) for param, grad in zip(params, parts_of(settled_grads(params)), strict=True)]
    return {
        device: ([params[i] for i in places], [grads[i] for i in places])
        for device, places in by_device(grads, range(len(grads))).items()
    }


def _values(param: Tensor, grad: Tensor) -> Tensor:
    if not grad.is_sparse:
        return grad
    if grad.dtype is torch.float16 and not grad.is_coalesced():
        param.grad = grad = grad.coalesce()  # an overflow in adding values up later goes unnoticed
    return values_of(grad)
