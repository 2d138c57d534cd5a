"""Grads that are gone before the backward is over."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

Release = Callable[[Tensor], None]


class GradientRelease:
    """What ``AdamW.release_grads`` began."""

    def __init__(self, params: Iterable[tuple[Tensor, Release]]) -> None:
        self._is_accumulating = False
        self._hooks = [param.register_post_accumulate_grad_hook(self._hook(release)) for param, release in params]

    def _hook(self, release: Release) -> Release:
        def after_accumulation(param: Tensor) -> None:
            if not self._is_accumulating:
                release(param)

        return after_accumulation

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Around every backward but the last one before a step: grads add up as ever, and stay."""
        self._is_accumulating = True
        try:
            yield
        finally:
            self._is_accumulating = False

    def remove(self) -> None:
        """Ends it: grads stay again until the user frees them."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    @property
    def is_active(self) -> bool:
        return bool(self._hooks)


def narrow(param: Tensor) -> None:
    """Keeps the grad in 16 bits."""
    grad = param.grad
    if grad is not None and grad.dtype == torch.float32:
        param.grad = None
        param.grad_dtype = torch.bfloat16
        param.grad = grad.to(torch.bfloat16)


def free(params: Iterable[Tensor]) -> None:
    """And the next grad comes in the parameter's dtype again."""
    for param in params:
        param.grad = None
        if param.grad_dtype != param.dtype:
            param.grad_dtype = param.dtype
