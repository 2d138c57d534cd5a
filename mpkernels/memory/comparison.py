"""What mixed precision saves of a training step's memory."""

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mpkernels.amp.mixed import to_mixed
from mpkernels.amp.policy import Policy
from mpkernels.memory import measure
from mpkernels.memory.report import Loss, MemoryReport, memory_report, text
from mpkernels.optim import AdamW
from mpkernels.tables import Report, Table


@dataclass(frozen=True)
class MemoryComparison(Report):
    """A memory report for each way to train."""

    reports: dict[str, MemoryReport]

    def as_dict(self) -> dict[str, dict[str, Any]]:
        return {way: report.as_dict() for way, report in self.reports.items()}

    def _parts(self) -> list[str | Table]:
        reports = self.reports.values()
        rows = [[name, *(text(it.predicted[name]) for it in reports)] for name in self.reports["fp32"].predicted]
        rows.append(["total", *(text(it.total) for it in reports)])
        return [Table(["", *self.reports], rows, holds_numbers=True)]


def compare_memory(
    model: nn.Module, loss: Loss, policy: Policy | str | None = None, device: str | torch.device | None = None
) -> MemoryComparison:
    """Compare the memory of one training step in three ways: in fp32; by torch.amp and torch's AdamW; by ``to_mixed``
    and mpkernels' AdamW.

    Args:
        model: the model to train. Each way runs a copy, and the model stays unchanged.
        loss: a function that takes the model and returns the loss of a batch. It needs no autocast of its own.
        policy: the policy of the two mixed ways. None takes the machine's best one, or ``"mixed_bfloat16"`` if that is
            float32.
        device: where to train; None is the model's device.
    """
    first = next(model.parameters(), None)
    if first is None:
        raise ValueError(f"compare_memory: model must have parameters to train, got {type(model).__name__}")
    measure.refuse_meta("compare_memory", model)
    device = first.device if device is None else torch.device(device)
    if policy is None:
        best = Policy.best(device)
        policy = Policy("mixed_bfloat16") if best.name == "float32" else best
    policy = Policy(policy) if isinstance(policy, str) else policy
    if policy.name == "float32":
        raise ValueError(f"compare_memory: policy must be a mixed one, got {policy.name!r}")
    fp32, ours = deepcopy(model).to(device), to_mixed(deepcopy(model).to(device), policy.compute_dtype)
    return MemoryComparison(
        {
            "fp32": _report(fp32, torch.optim.AdamW, loss, Policy("float32")),
            "torch.amp": _report(fp32, torch.optim.AdamW, loss, policy),
            "mpkernels": _report(ours, AdamW, loss, policy),
        }
    )


def _report(model: nn.Module, make_optimizer: Any, loss: Loss, policy: Policy) -> MemoryReport:
    def cast_loss(model: nn.Module) -> Tensor:
        with policy.autocast(next(model.parameters()).device):
            return loss(model)

    return memory_report(model, make_optimizer([it for it in model.parameters() if it.requires_grad]), cast_loss)
