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
    """A memory report for each way to train, and the measured peak of a step: how much the weights and the step added
    to the memory in use. On CUDA that is the memory allocated by torch; on a CPU the process's resident memory, which
    is coarse."""

    reports: dict[str, MemoryReport]
    peaks: dict[str, int]

    def as_dict(self) -> dict[str, dict[str, Any]]:
        return {way: report.as_dict() | {"peak": self.peaks[way]} for way, report in self.reports.items()}

    def _parts(self) -> list[str | Table]:
        reports = self.reports.values()
        rows = [[name, *(text(report.predicted[name]) for report in reports)] for name in next(iter(reports)).predicted]
        rows.append(["total", *(text(report.total) for report in reports)])
        of_process = any("resident" in report.device for report in reports)
        rows.append(["measured peak" + " of the process" * of_process, *map(text, self.peaks.values())])
        return [Table(["", *self.reports], rows, holds_numbers=True)]


def compare_memory(
    model: nn.Module, loss: Loss, policy: Policy | str | None = None, device: str | torch.device | None = None
) -> MemoryComparison:
    """Measure the memory of one training step in three ways: in fp32; by torch.amp and torch's AdamW; by ``to_mixed``
    and mpkernels' AdamW.

    Args:
        model: the model to train. Each way trains a copy, and the model stays unchanged.
        loss: a function that takes the model and returns the loss of a batch. It needs no autocast of its own.
        policy: the policy of the two mixed ways. None takes the machine's best one, or ``"mixed_bfloat16"`` if that is
            float32.
        device: where to train; None is the model's device.
    """
    of_model = [param.device for param in model.parameters()]
    if not of_model:
        raise ValueError(f"compare_memory: model must have parameters to train, got {type(model).__name__}")
    measure.refuse_meta("compare_memory", model)
    on = of_model[0] if device is None else torch.device(device)
    if policy is None:
        policy = Policy.best(on)
        policy = Policy("mixed_bfloat16") if policy.name == "float32" else policy
    policy = Policy(policy) if isinstance(policy, str) else policy
    if policy.name == "float32":
        raise ValueError(f"compare_memory: policy must be a mixed one, got {policy.name!r}")
    reports, peaks = {}, {}
    for way in ("fp32", "torch.amp", "mpkernels") * 2:  # the first time, libraries load what stays
        measure.clean_up()
        before = measure.used(on)
        copied = deepcopy(model).to(on)
        reports[way], peak = _of_way(way, copied, loss, policy, on)
        peaks[way] = peak - before
        del copied
    return MemoryComparison(reports, peaks)


def _of_way(way: str, model: nn.Module, loss: Loss, policy: Policy, device: torch.device) -> tuple[MemoryReport, int]:
    if way == "mpkernels":
        to_mixed(model, policy.compute_dtype)
    kind = AdamW if way == "mpkernels" else torch.optim.AdamW
    optimizer = kind([param for param in model.parameters() if param.requires_grad])
    used_by = Policy("float32") if way == "fp32" else policy
    scaler = used_by.scaler(device.type)

    def cast_loss(model: nn.Module) -> Tensor:
        with used_by.autocast(device.type):
            return loss(model)

    with measure.restored([], device):  # the same random numbers for each way
        for _ in range(2):  # the state is there from the second on
            measure.start_peak(device)
            scaler.scale(cast_loss(model)).backward()
            scaler.step(optimizer)
            scaler.update()
            peak = measure.peak(device)
            optimizer.zero_grad()
    return memory_report(model, optimizer, cast_loss), peak
