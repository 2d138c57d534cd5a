"""How much memory a training takes, where two of them share a process."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer


class Meter:
    """``peak``, in bytes: on CUDA what the allocator saw; on a CPU weights, grads, optimizer's state and what autograd
    saved for the backward, counted in the first step."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.peak = device, 0

    @contextmanager
    def watch(self, model: Module, optimizer: Optimizer) -> Iterator[None]:
        if self.device.type == "cuda":
            kept = _bytes(_kept(model, optimizer))
            torch.cuda.reset_peak_memory_stats(self.device)
            others = torch.cuda.memory_allocated(self.device) - kept
            yield
            self.peak = max(self.peak, torch.cuda.max_memory_allocated(self.device) - others)
        elif self.peak:
            yield
        else:
            saved: dict[int, int] = {}

            def note(tensor: Tensor) -> Tensor:
                storage = tensor.untyped_storage()
                saved[storage.data_ptr()] = storage.nbytes()
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                yield
            for param in model.parameters():  # is saved, too, and counted as what it is
                saved.pop(param.untyped_storage().data_ptr(), None)
            self.peak = sum(saved.values()) + _bytes(_kept(model, optimizer))


def _kept(model: Module, optimizer: Optimizer) -> list[Tensor]:
    params = list(model.parameters())
    states = [it for state in optimizer.state.values() for it in state.values() if isinstance(it, Tensor)]
    return params + [param.grad for param in params if param.grad is not None] + states


def _bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)
