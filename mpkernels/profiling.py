"""Measures where the time of a training loop goes. Until ``profile`` is called, it costs nothing."""

import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from operator import methodcaller
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import profiler
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from mpkernels.optim.step_hooks import PassiveHook
from mpkernels.overflow.find_nonfinite import tensors_in

Batch = TypeVar("Batch")


class Profile:
    """The object that ``with mpkernels.profile() as profile:`` yields: measures a loop and shows the results."""

    def __init__(self, profiler: Any, warmup: int) -> None:
        self._profiler, self._warmup = profiler, warmup
        self._batches = 0
        self.steps = 0  #: how many batches were measured: all after the warm-up
        self.samples = 0  #: how many samples these batches had, by the first dimension of each batch's first tensor
        self.seconds = 0.0  #: how long the measured batches took, until the device had finished
        self.waited = 0.0  #: the part of ``seconds`` in which the loop waited for its next batch

    @property
    def samples_per_second(self) -> float | None:
        """Samples per second of the measured batches. None if no batch came after the warm-up."""
        return self.samples / self.seconds if self.seconds else None

    @property
    def data_wait(self) -> float | None:
        """The share of the time in which the loop waited for its next batch, from 0 to 1. None where nothing was
        measured."""
        return self.waited / self.seconds if self.seconds else None

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the loader's batches, and measure how long the loop waits for each."""
        start = None if self._warmup else _now()
        wait_began = time.perf_counter()
        try:
            for count, batch in enumerate(loader, 1):
                self._batches += 1
                if start is not None:
                    self.waited += time.perf_counter() - wait_began
                    self.steps += 1
                    self.samples += next((len(it) for it in tensors_in(batch) if it.dim() > 0), 1)
                yield batch
                if count == self._warmup:
                    start = _now()
                wait_began = time.perf_counter()
        finally:
            if start is not None:
                self.seconds += _now() - start

    def table(self, rows: int = 20) -> str:
        """Return the throughput and, if there is a trace, torch.profiler's table of the costliest ops."""
        lines = []
        if self.seconds:
            lines.append(f"{self.samples_per_second:,.1f} samples/s, {self.data_wait:.0%} of the time waiting for data")
        elif self._batches:
            lines.append(f"throughput was not measured: {self._batches} batches came, and warmup={self._warmup}")
        if self._profiler is not None:
            sort_by = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
            lines.append(self._profiler.key_averages().table(sort_by=sort_by, row_limit=rows, max_name_column_width=40))
        return "\n".join(lines)

    __str__ = table


def _now() -> float:
    """Return the time at which the device has finished all that it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


@contextmanager
def _phase(name: str) -> Iterator[None]:
    """Mark a range in the trace and, if there is a GPU, in Nsight's."""
    nsights = torch.cuda.nvtx.range(f"mpkernels.{name}") if torch.cuda.is_available() else nullcontext()
    with torch.autograd.profiler.record_function(f"mpkernels.{name}"), nsights:
        yield


@contextmanager
def _named_phases() -> Iterator[None]:
    """Mark forward, backward and step by torch's hooks. The backward has no hook, so torch.autograd.backward is
    wrapped."""
    phases: list[Any] = []  # the phases that have begun
    depth = 0  # how deep calls of modules are nested: the outermost call is the phase

    def begin(name: str) -> None:
        phases.append(_phase(name))
        phases[-1].__enter__()

    def end() -> None:
        phases.pop().__exit__(None, None, None)

    def before_module(*_: Any) -> None:
        nonlocal depth
        depth += 1
        if depth == 1:
            begin("forward")

    def after_module(*_: Any) -> None:
        nonlocal depth
        depth -= 1
        if depth == 0:
            end()

    hooks = [
        register_module_forward_pre_hook(before_module),
        register_module_forward_hook(after_module, always_call=True),
        register_optimizer_step_pre_hook(PassiveHook(lambda _: begin("step"))),
        register_optimizer_step_post_hook(PassiveHook(lambda _: end())),
    ]
    backward = torch.autograd.backward
    torch.autograd.backward = _phase("backward")(backward)
    try:
        yield
    finally:
        torch.autograd.backward = backward
        for hook in hooks:
            hook.remove()
        while phases:  # a step has raised
            end()


@contextmanager
def _traced(path: Path) -> Iterator[Any]:
    """Run torch.profiler, and write its trace at the end, also after an exception."""
    if path.suffix == ".json":
        path.parent.mkdir(parents=True, exist_ok=True)
        write: Any = methodcaller("export_chrome_trace", str(path))
    else:
        write = profiler.tensorboard_trace_handler(str(path))
    activities = [profiler.ProfilerActivity.CPU]
    activities += [profiler.ProfilerActivity.CUDA] * torch.cuda.is_available()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using `torch.compile")  # warns of hooks; ours count nested calls
        # acc_events silences an older torch's warning about lost events of other cycles; there are no other cycles.
        with profiler.profile(activities=activities, on_trace_ready=write, acc_events=True) as running, _named_phases():
            yield running


@contextmanager
def profile(path: str | Path | None = None, *, warmup: int = 3) -> Iterator[Profile]:
    """Measure the throughput of a training loop, and write a trace in which its phases have names.

    >>> with mpkernels.profile("trace.json") as profile:
    ...     for inputs, targets in profile.batches(loader):
    ...         ...
    >>> print(profile.table())

    The trace is torch.profiler's, with the ranges ``mpkernels.forward``, ``.backward`` and ``.step`` around the ops. On
    a GPU, Nsight shows these ranges, too. The throughput, and the share of time spent waiting for data, are measured
    over ``profile.batches``. A trace slows the loop down, so measure them without one.

    Args:
        path: where to write the trace: a ``*.json`` file for Perfetto and chrome://tracing, or a directory for
            TensorBoard. None writes no trace.
        warmup: how many batches to run before measuring begins.
    """
    if not isinstance(warmup, int) or warmup < 0:
        raise ValueError(f"profile: warmup must be a whole number from 0 on, got {warmup!r}")
    with nullcontext() if path is None else _traced(Path(path)) as running:
        yield Profile(running, warmup)
        _now()
