"""What AdamW knows of its grads before they are used: their norm, and whether they cost the step."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpkernels import _processes
from mpkernels._adamw_table import Table
from mpkernels._params import sum_of
from mpkernels.ops import adamw


class Verdict(NamedTuple):
    """Of all devices and processes, for adamw_."""

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None
    total_sumsq: Tensor | None = None
    told: Tensor | None = None
    has_norm: bool = False
    comes_inside: bool = False  # the step looks at the grads itself, before all else


def is_guarded(optimizer: Any, has_16_bit_parameters: bool, found_inf: Any = None) -> bool:
    """Whether the grads are looked at before the step. A scaler that has looked already need not be repeated."""
    if optimizer.max_norm is not None or optimizer.guard or getattr(optimizer, "told", None) is not None:
        return True
    on_by_itself = has_16_bit_parameters or optimizer._peers is not None  # which may have 16-bit parameters
    return optimizer.guard is None and found_inf is None and on_by_itself


def on(optimizer: Any, tables: Sequence[Table], params: Sequence[Tensor], grads: list[Any]) -> Verdict:
    processes, grad_scale = _processes.of_step(optimizer), getattr(optimizer, "grad_scale", None)
    if not tables and processes is None:
        return Verdict()
    found_inf: Any = getattr(optimizer, "found_inf", None)
    guarded = is_guarded(optimizer, any(table.has_16_bit_parameters for table in tables), found_inf)
    if not guarded and found_inf is None:
        return Verdict(grad_scale)
    if optimizer._has_fsdp_parts and (processes is None or not (processes.holds_parts or optimizer.max_norm is None)):
        _processes.refuse_fsdp_parts("AdamW")
    comes_inside = guarded and processes is None and len(tables) == 1 and tables[0].can_look_at_grads()
    total_sumsq = None
    if guarded and not comes_inside:
        total_sumsq, found_inf = _look(tables, grads, found_inf)
    if processes is not None:
        sumsq_of_all, found_inf = processes.agree(params, total_sumsq, found_inf)
        total_sumsq = sumsq_of_all if guarded and processes.holds_parts else total_sumsq
        _processes.hand_back(optimizer, found_inf)
    told = _start_telling(optimizer, tables[0].device if tables else found_inf.device)
    verdict = Verdict(grad_scale, found_inf, total_sumsq, told, guarded, comes_inside)
    if not tables:
        _tell(verdict, optimizer.skipped_steps)
    return verdict


def _look(tables: Sequence[Table], grads: list[Any], found_inf: Tensor | None) -> tuple[Tensor, Tensor]:
    """found_inf: a scaler's."""
    nothing = torch.zeros((), dtype=torch.float64)
    stats = [table.stats(grads) for table in tables]
    found_infs = [each.found_inf for each in stats] + ([] if found_inf is None else [found_inf])
    return sum_of([each.total_sumsq for each in stats] or [nothing]), sum_of(found_infs or [nothing])


def _start_telling(optimizer: Any, device: torch.device) -> Tensor:
    if not torch.compiler.is_compiling():
        if optimizer.skipped_steps is None:
            optimizer.skipped_steps = torch.zeros((), dtype=torch.float32, device=device)
        optimizer.skipped_steps = optimizer.skipped_steps.to(device)
    told: Tensor | None = getattr(optimizer, "told", None)
    return torch.empty(2, dtype=torch.float32, device=device) if told is None else told


def _tell(verdict: Verdict, skipped_steps: Tensor | None) -> None:
    """As adamw_, which tells nothing where there is nothing to step."""
    it: Any = SimpleNamespace(**verdict._asdict(), skipped_steps=skipped_steps)
    adamw._tell(it, adamw._is_skipped(it))
