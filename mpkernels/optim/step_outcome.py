"""What a step finds out in this process before it uses its grads, and what it leaves behind."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpkernels._shared.parameters import params_of, put_on, sum_of
from mpkernels.distributed import fsdp1, meshes
from mpkernels.distributed.processes import Processes, processes_of_scaler
from mpkernels.optim.masters import needs_master
from mpkernels.optim.plan import Plan, Verdict
from mpkernels.optim.readback import Readback


def _skips_so_far(optimizer: Any) -> Tensor | None:
    """How many steps were skipped so far because of an inf or NaN: fp32, on the device. None if no step has checked its
    grads. Each read makes a new tensor, which later steps leave alone."""
    return None if optimizer._skips is None else optimizer._skips.clone()


def _set_skips(optimizer: Any, skips: Tensor | None) -> None:
    optimizer._skips = None if skips is None else skips.clone()


count_of_skips = property(_skips_so_far, _set_skips)  # an optimizer's skipped_steps


class Agreed(NamedTuple):
    """What all processes have found before a step that has hooks around it."""

    found_inf: Tensor
    own_sumsq: Tensor | None  # of this process's grads at that time
    sumsq_of_all: Tensor | None
    may_all_change: bool  # whether all have hooks or steps that may change grads: the norm is found anew

    def is_final(self) -> bool:
        return self.own_sumsq is None or not self.may_all_change or self.found_inf.item() > 0

    def contradicts(self, now: Verdict) -> bool:
        """Return whether the grads have another norm by now, and all would step."""
        before, after = self.own_sumsq, now.total_sumsq
        if before is None or after is None or self.found_inf.item() > 0:
            return False
        return before.item() != after.item()


class StepOutcome:
    """What an optimizer's steps have found: whether the last one was skipped, who holds the parameters, and what other
    processes have said."""

    def __init__(self) -> None:
        self.parts: meshes.Parts | None = None  # the processes that hold the other parts of DTensors
        self.has_parts = False  # whether other processes hold parts of the parameters: DTensors, or FSDP1's
        self.has_16_bit_parameters = False
        self.agreed: Agreed | None = None  # from before hooks run until the step
        self.failures: Readback | None = None  # how many processes have failed in the last common step
        self._was_skipped = Readback()

    def find_parts(self, params: Sequence[Tensor], peers: Processes | None) -> None:
        """Note which processes hold parts of these DTensors, whether other processes hold parts of the parameters at
        all, and whether any has 16 bits. peers: the processes that the user has named."""
        self.parts = meshes.peers_of(params, None if peers is None else peers.group)
        self.has_parts = self.parts is not None or fsdp1.has_parts(params)
        self.has_16_bit_parameters = any(map(needs_master, params))

    def note_skip(self, vector: Tensor | None) -> None:
        """Keep the outcome that a launched step writes, if it writes one."""
        if vector is None:
            self._was_skipped.forget()
        else:
            self._was_skipped.send(vector[1])

    def was_skipped(self) -> Tensor | None:
        """Return whether the newest step that the device has finished was skipped. The host doesn't wait."""
        skipped = self._was_skipped.read()
        return None if skipped is None else skipped > 0


def is_guarded(optimizer: Any, has_16_bit_parameters: bool, found_inf: Any = None) -> bool:
    """Return whether the optimizer checks the grads before it steps. If a scaler has checked them, it need not."""
    if optimizer.max_norm is not None or optimizer.guard or getattr(optimizer, "outcome", None) is not None:
        return True
    on_by_itself = has_16_bit_parameters or optimizer._peers is not None  # peers may have 16-bit parameters
    return optimizer.guard is None and found_inf is None and on_by_itself


def shown_guard(optimizer: Any) -> str:
    """Return the option, and whether the guard is on where the option leaves that to the optimizer."""
    if optimizer.guard is not None:
        return str(optimizer.guard)
    return f"None ({'on' if is_guarded(optimizer, any(map(needs_master, params_of(optimizer)))) else 'off'})"


def found_here(
    optimizer: Any, plans: Sequence[Plan], params: Sequence[Tensor], grads: list[Any]
) -> tuple[Verdict, Processes | None]:
    """Return this process's verdict, and the processes that have to agree on one."""
    grad_scale: Tensor | None = getattr(optimizer, "grad_scale", None)
    found_inf: Any = getattr(optimizer, "found_inf", None)
    guarded, processes = find_deciders(optimizer, plans, params, found_inf)
    if (not plans and processes is None) or (not guarded and found_inf is None):
        return Verdict(grad_scale), None
    comes_inside = guarded and processes is None and len(plans) == 1 and plans[0].native_step() is not None
    total_sumsq = None
    if guarded and not comes_inside:
        total_sumsq, found_inf = _look(plans, params, grads, found_inf)
    device = plans[0].device if processes is None or plans else processes.device_of(params)
    if not torch.compiler.is_compiling():
        if optimizer._skips is None:
            optimizer._skips = torch.zeros((), dtype=torch.float32, device=device)
        optimizer._skips = put_on(device, optimizer._skips)
    vector = getattr(optimizer, "outcome", None)  # a scaler brings a vector to read the skip from
    vector = torch.empty(2, dtype=torch.float32, device=device) if vector is None else vector
    return Verdict(grad_scale, found_inf, total_sumsq, vector, guarded, comes_inside), processes


def find_deciders(
    optimizer: Any, plans: Sequence[Plan], params: Sequence[Tensor], found_inf: Any
) -> tuple[bool, Processes | None]:
    """Return whether the step checks its grads, and the processes that decide with it."""
    outcome: StepOutcome = optimizer._step_outcome
    plans_have_16_bits = any(it.has_16_bit_parameters for it in plans)
    # A process without grads decides as the others do.
    has_16_bits = outcome.has_16_bit_parameters if outcome.has_parts else plans_have_16_bits
    guarded = is_guarded(optimizer, has_16_bits, found_inf)
    if not guarded and found_inf is None:
        return False, None
    return guarded, processes_of(optimizer, params, optimizer._scaler if hasattr(optimizer, "found_inf") else None)


def processes_of(optimizer: Any, params: Sequence[Tensor], scaler: Any) -> Processes | None:
    """Return the processes that skip a step under this scaler together."""
    outcome: StepOutcome = optimizer._step_outcome
    found: Processes | None = outcome.parts or optimizer._peers
    if found is None and outcome.has_parts:
        found = fsdp1.peers_of(type(optimizer).__name__, params, optimizer.max_norm is not None)
    return found or getattr(optimizer, "peers", None) or (None if scaler is None else processes_of_scaler(scaler))


def _look(
    plans: Sequence[Plan], params: Sequence[Tensor], grads: list[Any], found_inf: Any
) -> tuple[Tensor, Tensor | None]:
    """Return the sum of squares and found_inf over all devices. The latter includes the found_inf of a scaler."""
    if not plans:
        return torch.zeros((), dtype=torch.float64, device=params[0].device if params else "cpu"), found_inf
    sums, found_infs = map(list, zip(*(plan.look(grads) for plan in plans), strict=True))
    return sum_of(sums), sum_of(found_infs if found_inf is None else [*found_infs, found_inf])
