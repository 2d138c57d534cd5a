"""What AdamW finds out about its grads before it uses them: their norm, and whether the step must be skipped."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpkernels.distributed import fsdp1, meshes
from mpkernels.distributed.processes import Processes, hand_back, of_scaler
from mpkernels.optim.masters import needs_master
from mpkernels.optim.plan import Plan, Verdict
from mpkernels.parameters import put_on, sum_of


def is_guarded(optimizer: Any, has_16_bit_parameters: bool, found_inf: Any = None) -> bool:
    """Return whether the optimizer checks the grads before it steps. If a scaler has checked them, it need not."""
    if optimizer.max_norm is not None or optimizer.guard or getattr(optimizer, "outcome", None) is not None:
        return True
    on_by_itself = has_16_bit_parameters or optimizer._peers is not None  # which may have 16-bit parameters
    return optimizer.guard is None and found_inf is None and on_by_itself


def found_here(
    optimizer: Any, plans: Sequence[Plan], params: Sequence[Tensor], grads: list[Any]
) -> tuple[Verdict, Processes | None]:
    """Return this process's verdict, and the processes that have to agree on one."""
    grad_scale: Tensor | None = getattr(optimizer, "grad_scale", None)
    found_inf: Any = getattr(optimizer, "found_inf", None)
    guarded, processes = _asks(optimizer, plans, params, found_inf)
    if (not plans and processes is None) or (not guarded and found_inf is None):
        return Verdict(grad_scale), None
    comes_inside = guarded and processes is None and len(plans) == 1 and plans[0].can_look_within_the_step()
    total_sumsq = None
    if guarded and not comes_inside:
        total_sumsq, found_inf = _look(plans, params, grads, found_inf)
    device = plans[0].device if processes is None or plans else processes.device_of(params)
    outcome = _outcome_on(optimizer, device)
    return Verdict(grad_scale, found_inf, total_sumsq, outcome, guarded, comes_inside), processes


class Agreed(NamedTuple):
    """What all processes have found, before a step that hooks run around."""

    found_inf: Tensor
    own_sumsq: Tensor | None  # of this process's grads then
    sumsq_of_all: Tensor | None
    may_all_change: bool  # the grads, in hooks or in steps of their own, of which the norm is to be found anew

    def is_final(self) -> bool:
        return self.own_sumsq is None or not self.may_all_change or self.found_inf.item() > 0

    def with_own(self, now: Verdict) -> Verdict:
        before, after = self.own_sumsq, now.total_sumsq
        if before is None or after is None or self.found_inf.item() > 0 or before.item() == after.item():
            return now._replace(found_inf=self.found_inf, total_sumsq=self.sumsq_of_all if now.has_norm else None)
        raise RuntimeError(
            "AdamW: a hook has changed the grads in this process, after all processes had agreed on their norm; "
            "register it in all processes, or clip without max_norm"
        )


def of_all(optimizer: Any, params: Sequence[Tensor], verdict: Verdict, processes: Processes | None) -> Verdict:
    """Return the verdict of all processes."""
    if processes is None:
        return verdict
    agreed: Agreed | None = optimizer._agreed
    if agreed is not None:
        optimizer._agreed = None
        if hasattr(optimizer, "found_inf") and agreed.is_final():
            hand_back(optimizer, agreed.found_inf)
            return agreed.with_own(verdict)
    found_inf, total_sumsq, _ = ask(optimizer, params, verdict, processes)
    return verdict._replace(found_inf=found_inf, total_sumsq=total_sumsq)


def ask(
    optimizer: Any, params: Sequence[Tensor], verdict: Verdict, processes: Processes, may_change: bool = False
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return found_inf and the sum of squares of all processes, and in how many hooks may yet change the grads. Raise
    if another one has failed; on a GPU, whose answer is on its way, skip the step, and let the next one raise. A CUDA
    graph skips it at each replay, and nobody raises."""
    sumsq_of_all, found_inf, failed, changing = processes.agree(
        params, verdict.total_sumsq, verdict.found_inf, may_change=may_change
    )
    total_sumsq = sumsq_of_all if verdict.has_norm and processes.holds_parts else verdict.total_sumsq
    is_captured = failed.is_cuda and torch.cuda.is_current_stream_capturing()
    if not is_captured and not torch.compiler.is_compiling():
        optimizer._failed.send(failed)
        raise_if_one_has_failed(optimizer)
    hand_back(optimizer, found_inf)
    return found_inf, total_sumsq, changing


def raise_if_one_has_failed(optimizer: Any) -> None:
    failed = optimizer._failed.read()
    if failed is not None and failed.tolist() > 0:  # which waits for nothing: it lies on the host
        optimizer._failed.forget()
        optimizer._forget_plans()
        raise RuntimeError(
            "AdamW: step has failed in another process, whose error says why, so that no process has stepped"
        )


def note_outcome(optimizer: Any, verdict: Verdict) -> None:
    """Set what the optimizer shows of a step that has been launched."""
    outcome = verdict.outcome
    optimizer.grad_norm = outcome[0] if outcome is not None and verdict.has_norm else None
    if outcome is None:
        optimizer._was_skipped.forget()
    else:
        optimizer._was_skipped.send(outcome[1])


def tell_failure(optimizer: Any, params: Sequence[Tensor]) -> None:
    """Join the processes that wait for this one's verdict, though it has none, so that they don't step either."""
    find_parts(optimizer, params)  # if the step has not come so far
    _, processes = _asks(optimizer, (), params, getattr(optimizer, "found_inf", None))
    if processes is not None:
        optimizer._forget_plans()
        processes.agree(params, None, None, has_failed=True)


def find_parts(optimizer: Any, params: Sequence[Tensor]) -> None:
    """Note whether other processes hold parts of these parameters, and, of DTensors, which; whether any has 16 bits."""
    optimizer._parts = meshes.peers_of(params, None if optimizer._peers is None else optimizer._peers.group)
    optimizer._has_parts = optimizer._parts is not None or fsdp1.has_parts(params)
    optimizer._has_16_bit_parameters = any(map(needs_master, params))


def _asks(
    optimizer: Any, plans: Sequence[Plan], params: Sequence[Tensor], found_inf: Any
) -> tuple[bool, Processes | None]:
    """Return whether the step checks its grads, and the processes that it asks."""
    of_plans = any(it.has_16_bit_parameters for it in plans)
    # A process without grads decides as the others do.
    has_16_bit = optimizer._has_16_bit_parameters if optimizer._has_parts else of_plans
    guarded = is_guarded(optimizer, has_16_bit, found_inf)
    if not guarded and found_inf is None:
        return False, None
    return guarded, processes_of(optimizer, params, optimizer._scaler if hasattr(optimizer, "found_inf") else None)


def processes_of(optimizer: Any, params: Sequence[Tensor], scaler: Any) -> Processes | None:
    """Return the processes that skip a step under this scaler together."""
    found: Processes | None = optimizer._parts or optimizer._peers
    if found is None and optimizer._has_parts:
        found = fsdp1.peers_of("AdamW", params, optimizer.max_norm is not None)
    return found or of_scaler(optimizer, scaler)


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
