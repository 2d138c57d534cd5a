"""Keeps GradScaler's methods from doing a thing twice if a call has failed and is tried again."""

from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from mpkernels._torch_private.tensors import version_of


class Attempt:
    """One call of an op with some parameters' grads.

    The op changes ``mark`` with everything else. After an error, only the mark tells whether the op had run.
    """

    def __init__(self, params: Callable[[], Sequence[Tensor]], device: torch.device) -> None:
        #: begins as -1 (the mark) and 0. A step writes the norm, and 1 if it was skipped
        self.outcome = torch.arange(-1, 1, dtype=torch.float32, device=device)
        self.found_inf = self.outcome[1]
        self._params = params
        self._grads_then: list[tuple[ref[Tensor], object] | None] | None = None

    @property
    def mark(self) -> Tensor:
        return self.outcome[0]

    def note_failure(self) -> None:
        grads = [param.grad for param in self._params()]
        self._grads_then = [None if grad is None else (ref(grad), version_of(grad)) for grad in grads]

    def was_done(self) -> bool:
        """Return whether the call failed after its op had run, and no grad has changed since. Waits for the device."""
        then, grads = self._grads_then, [param.grad for param in self._params()]
        if then is None or len(then) != len(grads):
            return False
        are_same = all(
            old is None if grad is None else old is not None and grad is old[0]() and version_of(grad) == old[1]
            for grad, old in zip(grads, then, strict=True)
        )
        return are_same and self.mark.item() != -1


class AllOrNothing:
    """A context that restores the few numbers in the tensors if an error ends it."""

    def __init__(self, *tensors: Tensor | None) -> None:
        # On the CPU they are kept as Python's numbers, which takes a tenth of the time of a copy.
        as_numbers = not torch.compiler.is_compiling()
        self._before: list[tuple[Tensor, Any]] = [
            (tensor, tensor.tolist() if as_numbers and tensor.is_cpu else tensor.clone())
            for tensor in tensors
            if tensor is not None
        ]

    def __enter__(self) -> None:
        pass

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        for tensor, before in self._before if error is not None else ():
            tensor.copy_(torch.as_tensor(before, dtype=tensor.dtype, device=tensor.device))
