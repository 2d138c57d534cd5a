"""torchao's CPUOffloadOptimizer. The CPU stands in for the device, too."""

import types
import warnings
from contextlib import contextmanager, nullcontext
from unittest import mock

import torch

from tests.matrix.runner import Run, tool

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchao.optim import CPUOffloadOptimizer, cpu_offload


class Stream:
    """A stand-in for a stream, on which nothing is ever late."""

    def wait_stream(self, other):
        pass

    def synchronize(self):
        pass

    def record_event(self):
        return self


class TorchWithoutPinning(types.SimpleNamespace):
    """Stands for torch in torchao's module: it has our streams, and pins no memory."""

    cuda = types.SimpleNamespace(Stream=Stream, current_stream=Stream, stream=lambda _: nullcontext())

    def __getattr__(self, name):
        return getattr(torch, name)

    def empty_like(self, *args, pin_memory, **options):
        return torch.empty_like(*args, **options)


@contextmanager
def on_a_cpu():
    with (
        mock.patch.object(cpu_offload, "torch", TorchWithoutPinning()),
        mock.patch.object(cpu_offload, "get_available_devices", return_value=["cpu", "cuda"]),
    ):
        yield


@tool()
def torchao_cpu_offload(run: Run) -> None:
    """torchao makes an optimizer for each parameter."""
    with on_a_cpu():
        run.optimizer = CPUOffloadOptimizer(run.model.parameters(), run.drop_in.optimizer, minimal_size=0)
        run.steps()
    states = run.optimizer.optim_dict.items()
    run.optimizer.state = {param: inner.state[run.optimizer.param_d2h_map[param]] for param, inner in states}
