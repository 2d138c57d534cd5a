"""``mpkernels.tune``: times the ways to compute each call of one training step, because the user asks for it."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel

from mpkernels import selector
from mpkernels._shared.call_model import refuse_meta, refuse_no_model
from mpkernels._shared.parameters import is_sharded
from mpkernels._shared.report_tables import Report, Table
from mpkernels._torch_private.modes import unseen
from mpkernels._torch_private.sharded import is_fsdp1s
from mpkernels._torch_private.tensors import leaves_of, map_leaves
from mpkernels._torch_private.tracing import before_compile, uncompiled
from mpkernels.distributed import processes
from mpkernels.selector.case import Case
from mpkernels.selector.timing import Timed, time_ways


@dataclass
class TuneReport(Report):
    """What ``mpkernels.tune`` has found. ``print`` shows it as a table."""

    timed: dict[str, Timed] = field(default_factory=dict)  #: a description of each case, and its times

    def _parts(self) -> Iterator[str | Table]:
        if not self.timed:
            yield "Nothing was timed: the model has none of mpkernels' layers, blocks or fused MLPs."
            return
        names = list(dict.fromkeys(name for it in self.timed.values() for name in it.seconds))
        yield Table(["case", "computed by", *(f"{name}, x torch" for name in names if name != "torch")], [
            [case, it.best, *(_ratio(it, name) for name in names if name != "torch")] for case, it in self.timed.items()
        ])  # fmt: skip
        for case, it in self.timed.items():
            yield from (f"{case}: {name} is left out, for {why}" for name, why in it.left_out.items())


def _ratio(timed: Timed, name: str) -> str:
    return f"{timed.seconds['torch'] / timed.seconds[name]:.2f}" if name in timed.seconds else ""


def tune(model: nn.Module, *inputs: Any, process_group: Any = None, **keywords: Any) -> TuneReport:
    """Time the ways to compute each linear layer and block of one training step, and use the fastest ones from now on.

    Without this, calls follow the table in the docs of the selector. The step runs forward and, where autograd is on,
    backward. Call this function as you will call the model: with each size of inputs, under autocast, under
    ``torch.no_grad`` for inference; and before you capture a CUDA graph or compile the model. What is found counts in
    this process, and is written nowhere.

    In a group of several processes every rank must call this function: rank 0 times, and all ranks get its choices, so
    that all compute the same bits. A kernel that raises is left out.

    Parameters, their grads, buffers and torch's random numbers are unchanged afterwards, and no hook of an optimizer or
    of DistributedDataParallel runs. Tensors that a model keeps elsewhere, in plain attributes say, may change.

    Args:
        model: the model, not yet cut into parts by FSDP or tensor parallelism. It may be in DistributedDataParallel or
            torch.compile.
        inputs: the arguments that it is called with. Its outputs may be nested in tuples, lists and dicts.
        process_group: the ranks that call this function; None is all. The group's rank 0 times.
        keywords: the keyword arguments that the model is called with.
    """
    processes.given("tune", process_group)
    is_first = not processes.are_several() or distributed.get_rank(process_group) == 0
    found: dict[Case, Timed] = {}
    error: Exception | None = None
    asked: dict[Case, Any] = {}
    try:
        with _asking() as asked:
            _run_step(model, inputs, keywords)
        if is_first:
            found = {case: _timed(case, make) for case, make in asked.items()}
    except Exception as raised:  # the others must hear of it
        error = raised
    agreed = {case.for_all_ranks(): it for case, it in found.items()}
    agreed = processes.from_first_rank("tune", agreed, error, process_group)
    known = {case: agreed[case.for_all_ranks()] for case in asked if case.for_all_ranks() in agreed}
    for case, it in known.items():
        selector.tuned.pop(case, None)  # the newest comes last
        selector.tuned[case] = it.best
    selector.ask_again()
    return TuneReport({str(case): it for case, it in known.items()})


@contextmanager
def _asking() -> Iterator[dict[Case, Any]]:
    """Yield the cases that calls in this context ask for. No call counts as known by its key."""
    asked: dict[Case, Any] = {}
    selector._asked = asked
    selector.ask_again()
    try:
        yield asked
    finally:
        selector._asked = None
        selector.ask_again()


def _timed(case: Case, make_trial: Any) -> Timed:
    devices = [case.device] if case.device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.inference_mode(False), torch.enable_grad(), unseen():
        return time_ways(make_trial(), case.kernels, case.device)


def _run_step(model: nn.Module, inputs: Sequence[Any], keywords: Mapping[str, Any]) -> None:
    """Run a step that leaves no trace. The model gets parameters that share the memory of its own, and copies of
    buffers and inputs: so grads and BatchNorm's statistics stay, and no hook of an optimizer or of
    DistributedDataParallel hears of it. torch's random numbers go on as if nothing had been."""
    refuse_no_model("tune", model)
    refuse_meta("tune", model)
    step = _Step(_inner(model))
    params = dict(step.named_parameters())
    if any(is_fsdp1s(it) or is_sharded(it) for it in params.values()):
        raise TypeError(
            "tune: model must have whole parameters, got parts that FSDP or tensor parallelism made; "
            "tune the model, or one of its blocks, before"
        )
    params = {name: nn.Parameter(it.detach(), it.requires_grad) for name, it in params.items()}
    buffers = {name: _copy(it) for name, it in step.named_buffers()}
    args, kwargs = map_leaves(_copy, (tuple(inputs), dict(keywords)))
    tensors = [*params.values(), *buffers.values(), *leaves_of((args, kwargs))]
    devices = {it.device.index for it in tensors if isinstance(it, Tensor) and it.is_cuda}
    with torch.random.fork_rng(sorted(devices)), uncompiled():
        functional_call(step, params | buffers, args, kwargs)
    torch.clear_autocast_cache()  # else it keeps casts of these parameters until autocast ends


class _Step(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Any, **keywords: Any) -> None:
        outputs = leaves_of(self.model(*inputs, **keywords))
        roots = [it for it in outputs if isinstance(it, Tensor) and it.requires_grad]
        if roots:
            torch.autograd.backward(roots, [torch.ones_like(it) for it in roots])


def _inner(model: nn.Module) -> nn.Module:
    """Return what torch.compile and DistributedDataParallel wrap."""
    if isinstance(model, DistributedDataParallel):
        return _inner(model.module)
    compiled = before_compile(model)
    return model if compiled is None else _inner(compiled)


def _copy(value: Any) -> Any:
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value
