"""Where a training step's memory goes."""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mpkernels.distributed.parts import part_of
from mpkernels.memory import measure
from mpkernels.memory.forward import kept_by
from mpkernels.optim import masters, param_state
from mpkernels.optim.engine import Engine
from mpkernels.parameters import params_of, unwrapped
from mpkernels.tables import Report, Table

Loss = Callable[[nn.Module], Tensor]
Sizes = dict[str, int | None]

_MASTERS = set(masters.KEYS.values())


@dataclass(frozen=True)
class MemoryReport(Report):
    """The memory of a training step in this process, in bytes. Of a DTensor that is the part which lies here.

    ``predicted``: the size of each kind of tensor in a step. Parameters, buffers, gradients, masters and moments are
    computed from shapes and dtypes; cast cache and activations are counted in one forward.
    ``measured``: the size of the tensors that exist now.
    ``device``: on CUDA the allocated, reserved and peak memory of torch's allocator; elsewhere the resident memory of
    the whole process, with its libraries.
    """

    predicted: Sizes
    measured: Sizes
    device: dict[str, int]

    @property
    def total(self) -> int:
        """The sum of the predicted sizes. A real step may need less, because the backward frees activations while grads
        are made."""
        return sum(filter(None, self.predicted.values()))

    def as_dict(self) -> dict[str, Sizes]:
        return {"predicted": self.predicted, "measured": self.measured, "device": dict(self.device)}

    def _parts(self) -> list[str | Table]:
        rows = [[name, text(size), text(self.measured.get(name))] for name, size in self.predicted.items()]
        rows.append(["total", text(self.total), text(sum(filter(None, self.measured.values())))])
        rows += [[name, "", text(size)] for name, size in self.device.items()]
        return [Table(["", "predicted", "measured"], rows, holds_numbers=True)]


def memory_report(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, loss: Loss | None = None
) -> MemoryReport:
    """Return what a training step of the model holds in memory. Print it for a table.

    Args:
        model: the model that you train. It stays unchanged.
        optimizer: its optimizer, which need not have stepped, and stays unchanged.
        loss: a function that takes the model and returns the loss of a batch, under the autocast that you train with.
            It is run once, to count activations and autocast's casts. Without it, the report leaves these open. A
            model on the meta device, which can't run, is reported without it.
    """
    params = list(model.parameters())
    optimizer = unwrapped(optimizer)
    device = params[0].device if params else torch.device("cpu")
    measured: Sizes = {
        "parameters": measure.size(it for it in params if not it.is_meta),
        "buffers": measure.size(it for it in model.buffers() if not it.is_meta),
        "gradients": measure.size(param.grad for param in params if param.grad is not None),
        **_sizes([] if optimizer is None else optimizer.state.values()),
    }
    predicted: Sizes = {
        "parameters": measure.size(params),
        "buffers": measure.size(model.buffers()),
        "gradients": sum(_grad_size(param) for param in params if param.requires_grad),
        **(_sizes([]) if optimizer is None else _sizes_after_a_step(optimizer)),
        "cast cache": None,
        "activations": None,
    }
    if loss is not None:
        measure.refuse_meta("memory_report", model)
        with measure.restored([model], device):
            predicted["cast cache"], predicted["activations"] = kept_by(model, loss)
    return MemoryReport(predicted, measured, _on_device(device))


def _grad_size(param: Tensor) -> int:
    dtype = getattr(param, "grad_dtype", None) or param.dtype
    return int(part_of(param).numel()) * dtype.itemsize


def _sizes(states: Iterable[dict[str, Any]]) -> Sizes:
    copies: list[Tensor] = []
    moments: list[Tensor] = []
    for state in states:
        for key, value in state.items():
            if isinstance(value, Tensor):
                (copies if key in _MASTERS else moments).append(value)
    return {"masters": measure.size(copies), "moments": measure.size(moments)}


def _sizes_after_a_step(optimizer: torch.optim.Optimizer) -> Sizes:
    """Return the bytes of the states after a step; None if an optimizer can't say without one."""
    params = [param for param in params_of(optimizer) if param.requires_grad]
    if isinstance(optimizer, Engine):  # also after a load: masters are made at the first step
        return _sizes(
            param_state.create(optimizer._rule, part_of(param).to("meta"), group)
            for group in optimizer.param_groups
            for param in group["params"]
            if param.requires_grad
        )
    if all(optimizer.state.get(param) for param in params):
        return _sizes(optimizer.state.values())
    try:
        return _sizes(_states_of_a_twin(optimizer, params))
    except (RuntimeError, TypeError):  # its step reads values, or its constructor takes other arguments
        return {"masters": None, "moments": None}


def _states_of_a_twin(optimizer: torch.optim.Optimizer, params: list[Tensor]) -> list[dict[str, Any]]:
    """Return the states of a copy of the optimizer that has taken a step on the meta device, without memory."""
    twins = [nn.Parameter(part_of(param).detach().to("meta")) for param in params]
    for twin in twins:
        twin.grad = torch.empty_like(twin)
    kind: Any = type(optimizer)
    known = inspect.signature(kind).parameters.keys() - {"fused", "foreach", "capturable"}
    twin_optimizer = kind(twins, **{key: it for key, it in optimizer.defaults.items() if key in known})
    twin_optimizer.step()
    return list(twin_optimizer.state.values())


def _on_device(device: torch.device) -> dict[str, int]:
    if device.type == "cuda":
        return {
            "allocated": torch.cuda.memory_allocated(device),
            "reserved": torch.cuda.memory_reserved(device),
            "peak": torch.cuda.max_memory_allocated(device),
        }
    return {"resident process": measure.used(torch.device("cpu"))}


def text(size: int | None) -> str:
    return "-" if size is None else f"{size / 2**20:,.2f} MiB"
