"""Measures a training loop's throughput and its wait for data, and names its phases in a trace."""

import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import islice
from operator import methodcaller
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from mpkernels._shared.tensors_in import tensors_in
from mpkernels.optim.step_hooks import PassiveHook


class Profile:
    """What the last loop over ``batches`` has shown. Both numbers are None if it ended within the warm-up."""

    def __init__(self, warmup: int) -> None:
        self._warmup = warmup
        self.samples_per_second: float | None = None  #: by the first dimension of each batch's first tensor
        self.data_wait: float | None = None  #: the share of the time spent waiting for the next batch, from 0 to 1

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield the loader's batches, and measure the loop after the warm-up, until the device has finished."""
        remaining, samples, waited = iter(loader), 0, 0.0
        yield from islice(remaining, self._warmup)
        start = wait_began = _now()
        try:
            for batch in remaining:
                waited += time.perf_counter() - wait_began
                samples += next((len(it) for it in tensors_in(batch) if it.dim() > 0), 1)
                yield batch
                wait_began = time.perf_counter()
        finally:
            if samples:
                seconds = _now() - start
                self.samples_per_second, self.data_wait = samples / seconds, waited / seconds


def _now() -> float:
    """Return the time at which the device has finished all that it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


@contextmanager
def _phase(name: str) -> Iterator[None]:
    """Mark a range in the trace and, if there is a GPU, in Nsight's."""
    nsights = torch.cuda.nvtx.range(name) if torch.cuda.is_available() else nullcontext()
    with torch.profiler.record_function(name), nsights:
        yield


@contextmanager
def _named_phases() -> Iterator[None]:
    """Mark forward, backward and step by torch's hooks. The backward has no hook, so its function is wrapped."""
    begun: list[tuple[str, Any]] = []

    def begin(name: str) -> None:
        is_layer = name == "mpkernels.forward" and name in dict(begun)  # a part of its model's forward
        begun.append((name, nullcontext() if is_layer else _phase(name)))
        begun[-1][1].__enter__()

    def end(*_: Any) -> None:
        begun.pop()[1].__exit__(None, None, None)

    backward = torch.autograd.backward
    torch.autograd.backward = _phase("mpkernels.backward")(backward)
    try:
        with (
            register_module_forward_pre_hook(lambda *_: begin("mpkernels.forward")),
            register_module_forward_hook(end, always_call=True),
            register_optimizer_step_pre_hook(PassiveHook(lambda _: begin("mpkernels.step"))),
            register_optimizer_step_post_hook(PassiveHook(end)),
        ):
            yield
    finally:
        torch.autograd.backward = backward
        while begun:  # a step has raised
            end()


@contextmanager
def profile(path: str | Path | None = None, *, warmup: int = 3) -> Iterator[Profile]:
    """Measure a training loop over ``profile.batches(loader)``, after ``warmup`` batches. With a ``path``, write
    torch.profiler's trace, too, which slows the loop down. The ranges ``mpkernels.forward``, ``.backward`` and
    ``.step`` mark the loop's phases there, and in Nsight."""
    with ExitStack() as trace:
        if path is not None:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            # acc_events silences an older torch's warning about lost events of other cycles; there are no other cycles.
            write = methodcaller("export_chrome_trace", str(path))
            trace.enter_context(torch.profiler.profile(on_trace_ready=write, acc_events=True))
            trace.enter_context(_named_phases())
        yield Profile(warmup)
