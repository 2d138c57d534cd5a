"""Measures where the time of a training loop goes. Until ``profile`` is called, it costs nothing."""

import itertools
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import profiler

from mpkernels.optim.step_hooks import PassiveHook
from mpkernels.overflow.find_nonfinite import tensors_in

Batch = TypeVar("Batch")


class Profile:
    """The object that ``with mpkernels.profile() as profile:`` yields: measures a loop and shows the results."""

    def __init__(self, profiler: Any, warmup: int) -> None:
        self._profiler, self._warmup = profiler, warmup
        self._batches = 0
        self.steps = 0  #: the measured batches: those after the warm-up
        self.samples = 0  #: the samples in them: the first dimension of each batch's first tensor
        self.seconds = 0.0  #: how long they took, until the device had finished
        self.waited = 0.0  #: the part of these seconds in which the loop waited for its next batch

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
        iterator, start = iter(loader), None
        try:
            for count in itertools.count():
                if count == self._warmup:
                    _wait_for_device()
                    start = time.perf_counter()
                before = time.perf_counter()
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
                self._batches += 1
                if count >= self._warmup:
                    self.waited += time.perf_counter() - before
                    self.steps += 1
                    self.samples += _length(batch)
                yield batch
        finally:
            if start is not None:
                _wait_for_device()
                self.seconds += time.perf_counter() - start

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


@contextmanager
def _phase(name: str) -> Iterator[None]:
    """Mark a range in the trace and, if there is a GPU, in Nsight's."""
    nsights = torch.cuda.nvtx.range(f"mpkernels.{name}") if torch.cuda.is_available() else nullcontext()
    with torch.autograd.profiler.record_function(f"mpkernels.{name}"), nsights:
        yield


class _NamedPhases:
    """A context that marks the phases by torch's hooks. The backward has no hook, so torch.autograd.backward is
    wrapped."""

    def __enter__(self) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        modules = torch.nn.modules.module
        self._open: list[Any] = []
        self._depth = 0  # of calls of modules: the outermost one is the phase
        self._hooks = [
            modules.register_module_forward_pre_hook(self._before_module),
            modules.register_module_forward_hook(self._after_module, always_call=True),
            register_optimizer_step_pre_hook(PassiveHook(lambda _: self._begin("step"))),
            register_optimizer_step_post_hook(PassiveHook(lambda _: self._end())),
        ]
        self._backward = torch.autograd.backward
        torch.autograd.backward = _phase("backward")(self._backward)

    def __exit__(self, *_: object) -> None:
        torch.autograd.backward = self._backward
        while self._open:  # of a step that raised
            self._end()
        for hook in self._hooks:
            hook.remove()

    def _begin(self, name: str) -> None:
        self._open.append(_phase(name))
        self._open[-1].__enter__()

    def _end(self) -> None:
        self._open.pop().__exit__(None, None, None)

    def _before_module(self, *_: Any) -> None:
        if self._depth == 0:
            self._begin("forward")
        self._depth += 1

    def _after_module(self, *_: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._end()


@contextmanager
def _traced(path: Path) -> Iterator[Any]:
    """Run torch.profiler, and write its trace at the end, also after an exception."""
    activities = [profiler.ProfilerActivity.CPU]
    activities += [profiler.ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    if path.suffix == ".json":
        path.parent.mkdir(parents=True, exist_ok=True)
        write: Any = lambda running: running.export_chrome_trace(str(path))  # noqa: E731
    else:
        write = profiler.tensorboard_trace_handler(str(path))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using `torch.compile")  # under our hooks: they count what is nested
        # acc_events: or an older torch warns that events of other cycles are gone, of which there are none.
        with profiler.profile(activities=activities, on_trace_ready=write, acc_events=True) as running, _NamedPhases():
            yield running


def _wait_for_device() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _length(batch: object) -> int:
    return next((len(it) for it in tensors_in(batch) if it.dim() > 0), 1)


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
    running = nullcontext() if path is None else _traced(Path(path))
    with running as torchs:
        yield Profile(torchs, warmup)
        _wait_for_device()
