"""What keeps GradScaler's methods from doing a thing twice, where a call has failed and is tried again."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from weakref import ref

import torch
from torch import Tensor

from mpkernels._torch_private import version_of


class Attempt:
    """One call of an op with some parameters' grads.

    The op changes ``mark`` with everything else. If an error comes from there, nothing but the mark tells on which side
    of the op it came from.
    """

    def __init__(self, params: Sequence[Tensor], device: torch.device) -> None:
        #: -1 and 0. Of a step: where it writes the norm, and whether it was skipped
        self.outcome = torch.arange(-1.0, 1.0, dtype=torch.float32, device=device)
        self.mark, self.found_inf = self.outcome.unbind()
        self._params = params
        self._grads_then: list[tuple[ref[Tensor], object] | None] | None = None

    def note_failure(self) -> None:
        self._grads_then = [_state_of(param.grad) for param in self._params]

    def was_done(self) -> bool:
        """Return whether the call has failed after the op, and no grad has changed since. Waits for the device."""
        then = self._grads_then
        return then is not None and then == [_state_of(it.grad) for it in self._params] and self.mark.item() != -1


@contextmanager
def all_or_nothing(*tensors: Tensor | None) -> Iterator[None]:
    """Put back what the tensors hold now if an error ends this context."""
    there = [it for it in tensors if it is not None]
    before = [it.clone() for it in there]
    try:
        yield
    except BaseException:
        for tensor, value in zip(there, before, strict=True):
            tensor.copy_(value)
        raise


def _state_of(grad: Tensor | None) -> tuple[ref[Tensor], object] | None:
    return None if grad is None else (ref(grad), version_of(grad))
