"""Measures where the time of a training loop goes. Until ``profile`` is called, it costs nothing."""

import itertools
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any, TypeVar

import torch

from mpkernels._torch_private.ops import LOOKS_AT_GRADS
from mpkernels.optim.step_hooks import PassiveHook
from mpkernels.overflow.find_nonfinite import tensors_in

Batch = TypeVar("Batch")
PHASES = ("forward", "backward", "step")
STATS = "grad_stats", "unscale_", "update_scale_", *LOOKS_AT_GRADS  # in the names of ops


class Profile:
    """The object that ``with mpkernels.profile() as profile:`` yields: measures a loop and shows the results."""

    def __init__(self, path: Path | None, warmup: int) -> None:
        self._path, self._warmup = path, warmup
        self._profiler: Any = None
        self._depth = 0
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

    def phases(self) -> dict[str, float]:
        """Return the host's milliseconds in each phase. ``stats`` is the time of checking and clipping grads; it is
        contained in the other phases."""
        if self._profiler is None:
            return {}
        events = {event.key: event.cpu_time_total / 1e3 for event in self._profiler.key_averages()}
        stats = sum(ms for key, ms in events.items() if any(name in key for name in STATS) and "::" in key)
        return {phase: events.get(f"mpkernels.{phase}", 0.0) for phase in PHASES} | {"stats": stats}

    def table(self, rows: int = 15) -> str:
        """Return a table of the phases, the throughput, and the ops that took the most time."""
        lines = [f"{phase:10}{ms:10.1f} ms" for phase, ms in self.phases().items()]
        if self.samples_per_second is not None:
            lines.append(f"{self.samples_per_second:,.1f} samples/s, {self.data_wait:.0%} of the time waiting for data")
        elif self._batches:
            lines.append(f"throughput was not measured: {self._batches} batches came, and warmup={self._warmup}")
        if self._profiler is not None:
            sort_by = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
            lines.append(self._profiler.key_averages().table(sort_by=sort_by, row_limit=rows, max_name_column_width=40))
        return "\n".join(lines)

    __str__ = table

    @contextmanager
    def _running(self) -> Iterator["Profile"]:
        with ExitStack() as stack:
            if self._path is not None:
                stack.enter_context(warnings.catch_warnings())
                warnings.filterwarnings("ignore", "Using `torch.compile")  # under our hooks: they count what is nested
                self._profiler = stack.enter_context(_torchs(self._path))
                stack.enter_context(self._named_phases())
            yield self
            _wait_for_device()

    @contextmanager
    def _named_phases(self) -> Iterator[None]:
        """Mark the phases in the trace by torch's hooks. The backward has no hook, so torch.autograd.backward is
        wrapped."""
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        open_ranges: list[Any] = []
        forward_pre = torch.nn.modules.module.register_module_forward_pre_hook(lambda *_: self._enter(open_ranges))
        forward = torch.nn.modules.module.register_module_forward_hook(
            lambda *_: self._leave(open_ranges), always_call=True
        )
        step_pre = register_optimizer_step_pre_hook(PassiveHook(lambda _: open_ranges.append(_Range("step"))))
        step = register_optimizer_step_post_hook(PassiveHook(lambda _: open_ranges.pop().close()))
        backward = torch.autograd.backward
        torch.autograd.backward = _ranged(backward, "backward")
        try:
            yield
        finally:
            torch.autograd.backward = backward
            while open_ranges:  # of a step that raised
                open_ranges.pop().close()
            for handle in (forward_pre, forward, step_pre, step):
                handle.remove()

    def _enter(self, open_ranges: list[Any]) -> None:
        """The outermost module's forward is the phase."""
        if self._depth == 0:
            open_ranges.append(_Range("forward"))
        self._depth += 1

    def _leave(self, open_ranges: list[Any]) -> None:
        self._depth -= 1
        if self._depth == 0:
            open_ranges.pop().close()


class _Range:
    """Mark a range in the trace, and where there is a GPU, in Nsight's."""

    def __init__(self, phase: str) -> None:
        self._record = torch.autograd.profiler.record_function(f"mpkernels.{phase}")
        self._record.__enter__()
        if torch.cuda.is_available():
            torch.cuda.nvtx.range_push(f"mpkernels.{phase}")

    def close(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.nvtx.range_pop()
        self._record.__exit__(None, None, None)


def _ranged(function: Callable[..., Any], phase: str) -> Callable[..., Any]:
    @wraps(function)
    def ranged(*arguments: Any, **keywords: Any) -> Any:
        opened = _Range(phase)
        try:
            return function(*arguments, **keywords)
        finally:
            opened.close()

    return ranged


@contextmanager
def _torchs(path: Path) -> Iterator[Any]:
    from torch import profiler

    activities = [profiler.ProfilerActivity.CPU]
    activities += [profiler.ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    write = profiler.tensorboard_trace_handler(str(path)) if path.suffix != ".json" else partial(_export, path)
    # acc_events: or an older torch warns that events of other cycles are gone, of which there are none.
    with profiler.profile(activities=activities, on_trace_ready=write, acc_events=True) as running:
        yield running  # also of a loop that broke off


def _export(path: Path, running: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    running.export_chrome_trace(str(path))


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
    with Profile(None if path is None else Path(path), warmup)._running() as it:
        yield it
