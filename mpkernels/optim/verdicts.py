"""What AdamW finds out about its grads before it uses them: their norm, and whether the step must be skipped."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mpkernels.distributed import fsdp1
from mpkernels.distributed.processes import Processes, hand_back, of_scaler
from mpkernels.ops.adamw.adamw import write_outcome
from mpkernels.optim.masters import needs_master
from mpkernels.optim.plan import Plan, Verdict
from mpkernels.parameters import put_on, sum_of


def is_guarded(optimizer: Any, has_16_bit_parameters: bool, found_inf: Any = None) -> bool:
    """Return whether the optimizer checks the grads before it steps. If a scaler has checked them, it need not."""
    if optimizer.max_norm is not None or optimizer.guard or getattr(optimizer, "outcome", None) is not None:
        return True
    on_by_itself = has_16_bit_parameters or optimizer._peers is not None  # which may have 16-bit parameters
    return optimizer.guard is None and found_inf is None and on_by_itself


def on(optimizer: Any, plans: Sequence[Plan], params: Sequence[Tensor], grads: list[Any]) -> Verdict:
    grad_scale: Tensor | None = getattr(optimizer, "grad_scale", None)
    found_inf: Any = getattr(optimizer, "found_inf", None)
    has_16_bit = any(map(needs_master, params) if optimizer._has_parts else (it.has_16_bit_parameters for it in plans))
    guarded = is_guarded(optimizer, has_16_bit, found_inf)
    processes = _processes_of(optimizer, params) if guarded or found_inf is not None else None
    if (not plans and processes is None) or (not guarded and found_inf is None):
        return Verdict(grad_scale)
    comes_inside = guarded and processes is None and len(plans) == 1 and plans[0].can_look_within_the_step()
    total_sumsq = None
    if guarded and not comes_inside:
        total_sumsq, found_inf = _look(plans, params, grads, found_inf)
    if processes is not None:
        sumsq_of_all, found_inf = processes.agree(params, total_sumsq, found_inf)
        total_sumsq = sumsq_of_all if guarded and processes.holds_parts else total_sumsq
        hand_back(optimizer, found_inf)
    outcome = _outcome_on(optimizer, plans[0].device if plans else found_inf.device)
    verdict = Verdict(grad_scale, found_inf, total_sumsq, outcome, guarded, comes_inside)
    if not plans:
        write_outcome(*verdict[:4], optimizer.skipped_steps)  # as adamw_ would, which has nothing to step
    return verdict


def _processes_of(optimizer: Any, params: Sequence[Tensor]) -> Processes | None:
    found: Processes | None = optimizer._parts or optimizer._peers
    if found is None and optimizer._has_parts:
        found = fsdp1.peers_of("AdamW", params, optimizer.max_norm is not None)
    return found or of_scaler(optimizer)


def _look(
    plans: Sequence[Plan], params: Sequence[Tensor], grads: list[Any], found_inf: Any
) -> tuple[Tensor, Tensor | None]:
    """Return the sum of squares and found_inf over all devices. The latter includes the found_inf of a scaler."""
    if not plans:
        return torch.zeros((), dtype=torch.float64, device=params[0].device if params else "cpu"), found_inf
    stats = [plan.look(grads) for plan in plans]
    found_infs = [each.found_inf for each in stats] + ([] if found_inf is None else [found_inf])
    return sum_of([each.total_sumsq for each in stats]), sum_of(found_infs)


def _outcome_on(optimizer: Any, device: torch.device) -> Tensor:
    """Return the tensor that the step writes its outcome to, and have ``skipped_steps`` on the same device."""
    if not torch.compiler.is_compiling():
        if optimizer.skipped_steps is None:
            optimizer.skipped_steps = torch.zeros((), dtype=torch.float32, device=device)
        optimizer.skipped_steps = put_on(device, optimizer.skipped_steps)
    outcome: Tensor | None = getattr(optimizer, "outcome", None)
    return torch.empty(2, dtype=torch.float32, device=device) if outcome is None else outcome
