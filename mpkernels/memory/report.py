"""Reports where a training step's memory goes, and how much mixed precision saves."""

import inspect
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mpkernels._shared.call_model import refuse_meta, refuse_no_loss, refuse_no_model, refuse_no_optimizer
from mpkernels._shared.parameters import unwrapped
from mpkernels._shared.report_tables import Report, Table
from mpkernels._shared.saved_for_backward import saved_storages
from mpkernels._torch_private.modes import DispatchMode
from mpkernels._torch_private.ops import to_copy
from mpkernels._torch_private.tensors import storage_of
from mpkernels.amp.mixed import to_mixed
from mpkernels.amp.policy import Policy
from mpkernels.distributed.parts import part_of
from mpkernels.distributed.restoring import restored
from mpkernels.linear import cast_cache
from mpkernels.memory import measure
from mpkernels.optim import AdamW, masters, param_state
from mpkernels.optim.engine import Engine

Loss = Callable[[nn.Module], Tensor]
Sizes = dict[str, int | None]

_MASTERS = set(masters.KEYS.values())


@dataclass(frozen=True)
class MemoryReport(Report):
    """The memory of a training step in this process, in bytes. Of a DTensor, this process's part counts.

    ``predicted``: the size of each kind of tensor in a step. Parameters, buffers, gradients, masters and moments are
    computed from shapes and dtypes; cast cache and activations are counted in one forward. A real step may need less
    than their sum, because the backward frees activations while grads are made.
    ``measured``: the size of the tensors that exist now.
    ``device``: on CUDA the allocated, reserved and peak memory of torch's allocator; elsewhere the resident memory of
    the whole process, with its libraries. With ``offload``, also which of the measured bytes are on the host.
    """

    predicted: Sizes
    measured: Sizes
    device: dict[str, int]

    def _parts(self) -> list[str | Table]:
        table = _table({"predicted": self.predicted, "measured": self.measured})
        return [table._replace(rows=[*table.rows, *([name, "", _mib(size)] for name, size in self.device.items())])]


@dataclass(frozen=True)
class MemoryComparison(Report):
    """A memory report for each way to train."""

    reports: dict[str, MemoryReport]

    def _parts(self) -> list[str | Table]:
        return [_table({way: it.predicted for way, it in self.reports.items()})]


def _table(columns: dict[str, Sizes]) -> Table:
    sizes = columns.values()
    rows = [[name, *(_mib(size.get(name)) for size in sizes)] for name in next(iter(sizes))]
    total = ["total", *(_mib(sum(filter(None, size.values()))) for size in sizes)]
    return Table(["", *columns], [*rows, total], holds_numbers=True)


def _mib(size: int | None) -> str:
    return "-" if size is None else f"{size / 2**20:,.2f} MiB"


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
    refuse_no_model("memory_report", model)
    if optimizer is not None:
        refuse_no_optimizer("memory_report", optimizer)
    params = list(model.parameters())
    optimizer = unwrapped(optimizer)
    device = params[0].device if params else torch.device("cpu")
    measured: Sizes = {
        "parameters": measure.size(param for param in params if not param.is_meta),
        "buffers": measure.size(buffer for buffer in model.buffers() if not buffer.is_meta),
        "gradients": measure.size(param.grad for param in params if param.grad is not None),
        **_sizes([] if optimizer is None else optimizer.state.values()),
    }
    predicted: Sizes = {
        "parameters": measure.size(params),
        "buffers": measure.size(model.buffers()),
        "gradients": sum(map(_grad_size, params)),
        **(_sizes([]) if optimizer is None else _sizes_after_a_step(optimizer)),
        "cast cache": None,
        "activations": None,
    }
    if loss is not None:
        refuse_no_loss("memory_report", loss)
        refuse_meta("memory_report", model, "leave loss out, or call to_empty")
        with restored([model], device):
            predicted["cast cache"], predicted["activations"] = _kept_by_a_forward(model, loss)
    return MemoryReport(predicted, measured, _overview(device) | _on_host(optimizer, measured))


def _overview(device: torch.device) -> dict[str, int]:
    if device.type != "cuda":
        return {"resident process": measure.resident()}
    return {
        "allocated": torch.cuda.memory_allocated(device),
        "reserved": torch.cuda.memory_reserved(device),
        "peak": torch.cuda.max_memory_allocated(device),
    }


def _on_host(optimizer: Any, measured: Sizes) -> dict[str, int]:
    if not getattr(optimizer, "offload", False):
        return {}
    return {"of these, masters and moments on the host": (measured["masters"] or 0) + (measured["moments"] or 0)}


def compare_memory(model: nn.Module, loss: Loss, policy: Policy | str = "mixed_bfloat16") -> MemoryComparison:
    """Compare the memory of one training step in three ways: in fp32; by torch.amp and torch's AdamW; by ``to_mixed``
    and mpkernels' AdamW.

    Args:
        model: the model to train. Each way runs a copy, and the model stays unchanged.
        loss: a function that takes the model and returns the loss of a batch. It needs no autocast of its own.
        policy: the policy of the two mixed ways.
    """
    refuse_no_model("compare_memory", model)
    if next(model.parameters(), None) is None:
        raise ValueError(f"compare_memory: model must have parameters to train, got {type(model).__name__}")
    refuse_meta("compare_memory", model)
    refuse_no_loss("compare_memory", loss)
    policy = Policy(policy) if isinstance(policy, str) else policy

    def report(kind: Any, model: nn.Module, policy: Policy) -> MemoryReport:
        params = [param for param in model.parameters() if param.requires_grad]
        return memory_report(model, kind(params), policy.autocast(params[0].device)(loss))

    reports = {
        "fp32": report(torch.optim.AdamW, deepcopy(model), Policy("float32")),
        "torch.amp": report(torch.optim.AdamW, deepcopy(model), policy),
        "mpkernels": report(AdamW, to_mixed(deepcopy(model), policy.compute_dtype), policy),
    }
    return MemoryComparison(reports)


def _grad_size(param: Tensor) -> int:
    dtype = getattr(param, "grad_dtype", None) or param.dtype  # an older torch has no grad_dtype
    return int(part_of(param).numel()) * dtype.itemsize * param.requires_grad


def _sizes(states: Iterable[dict[str, Any]]) -> Sizes:
    tensors = [(key, value) for state in states for key, value in state.items() if isinstance(value, Tensor)]
    return {
        "masters": measure.size(value for key, value in tensors if key in _MASTERS),
        "moments": measure.size(value for key, value in tensors if key not in _MASTERS),
    }


def _sizes_after_a_step(optimizer: torch.optim.Optimizer) -> Sizes:
    """Return the bytes of the states after a step; None if they aren't known before the first step."""
    trained = [(param, group) for group in optimizer.param_groups for param in group["params"] if param.requires_grad]
    if isinstance(optimizer, Engine):  # computed even after a load, because the first step adds masters
        return _sizes(param_state.create(optimizer._rule, part_of(it).to("meta"), group) for it, group in trained)
    if all(optimizer.state.get(param) for param, _ in trained):
        return _sizes(optimizer.state.values())
    without_memory = [nn.Parameter(part_of(param).detach().to("meta")) for param, _ in trained]
    for param in without_memory:
        param.grad = torch.empty_like(param)
    kind: Any = type(optimizer)
    options = inspect.signature(kind).parameters.keys() - {"fused", "foreach", "capturable"}
    try:
        tried = kind(without_memory, **{key: it for key, it in optimizer.defaults.items() if key in options})
        tried.step()
    except (RuntimeError, TypeError):  # the step reads values, or the constructor takes other arguments
        return {"masters": None, "moments": None}
    return _sizes(tried.state.values())


def _kept_by_a_forward(model: nn.Module, loss: Loss) -> tuple[int, int]:
    """Return the bytes that a call of ``loss(model)`` keeps for its backward: first casts of parameters and buffers,
    then everything else except parameters and buffers themselves."""
    # A weight whose cast is cached would not be cast again, and not be counted.
    torch.clear_autocast_cache()
    cast_cache.clear()
    mode = _Casts({storage_of(part_of(it)) for it in (*model.parameters(), *model.buffers())})
    with saved_storages() as saved, mode:
        loss(model)
    not_activations = mode.storages | {storage_of(it) for it in mode.casts}
    activations = sum(size for storage, size in saved.items() if storage.cdata not in not_activations)
    return measure.size(mode.casts), activations


class _Casts(DispatchMode):  # type: ignore[misc]
    """Keeps the copies that autocast makes of these storages."""

    def __init__(self, storages: set[int]) -> None:
        super().__init__()
        self.storages = storages
        self.casts: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is to_copy and storage_of(part_of(args[0])) in self.storages:
            self.casts.append(part_of(out))
        return out
