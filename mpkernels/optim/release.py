"""Freeing grads inside the backward, for AdamW.release_grads."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from mpkernels._torch_private.sharded import is_fsdp1s
from mpkernels._torch_private.tensors import is_backward_nested
from mpkernels.distributed import ddp
from mpkernels.parts import settled_grads

Release = Callable[[Tensor], None]


class GradientRelease:
    """The handle that ``AdamW.release_grads`` returns: ``accumulate()`` pauses the freeing of grads, ``remove()`` ends
    it."""

    def __init__(self, releases: Iterable[tuple[Tensor, Release | None]]) -> None:
        """releases: each parameter, with the function to call once its grad is complete. None keeps the grad in 16 bits
        until the step."""
        releases = list(releases)
        self.steps_alone = any(release is not None for _, release in releases)  # in the backward
        self._params = [param for param, _ in releases]
        self._widths = {id(param): param.grad_dtype for param in self._params}  # of grads, as they are without us
        self._is_accumulating = False
        self._have_come: set[int] = set()  # the ids of those whose grads have come since the last step or zero_grad
        if any(map(is_fsdp1s, self._params)):
            raise ValueError("AdamW.release_grads: params must not be FSDP's, which frees grads itself; leave it out")
        ddp.watch()
        self._wrappers = 0  # that were made when it was last known that none of them has these parameters
        self._hooks = [
            param.register_post_accumulate_grad_hook(self._hook(release or _narrow)) for param, release in releases
        ]

    def _hook(self, release: Release) -> Release:
        def after_accumulation(param: Tensor) -> None:
            if self._wrappers != ddp.made():
                ddp.refuse("AdamW.release_grads", self._params)
                self._wrappers = ddp.made()
            if self._is_accumulating:
                return
            if self.steps_alone:
                self._refuse_second(param)
                if is_backward_nested():
                    return  # another checkpoint may use the parameter yet, and compute its forward anew
            release(param)

        return after_accumulation

    def _refuse_second(self, param: Tensor) -> None:
        """Raise if the parameter has had a grad since the last step or zero_grad: else one step would take it twice."""
        if id(param) in self._have_come:
            place = next(i for i, each in enumerate(self._params) if each is param)
            raise RuntimeError(
                f"AdamW.release_grads: params[{place}] of shape {tuple(param.shape)} must get its grad once before "
                "each step, got a second one; give reentrant checkpoints that share it use_reentrant=False, and run "
                "all backwards before a step but the last inside the accumulate() of what release_grads returned; "
                "after a failed backward, call the optimizer's zero_grad() or step()"
            )
        self._have_come.add(id(param))

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Keep the grads of a backward, so that the next one adds to them. Put every backward but the last one before a
        step inside this context."""
        self._restore_widths()
        self._is_accumulating = True
        try:
            yield
        finally:
            self._is_accumulating = False

    def remove(self) -> None:
        """Stop freeing grads: from now on they stay until the user frees them."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self.steps_alone = [], False
        for param in self._params:
            _set_width(param, self._widths[id(param)])

    def begin_anew(self) -> None:
        """Let each parameter get its grad again, as after a step. A backward that has failed is given up thereby."""
        self._have_come.clear()

    def after_step(self) -> None:
        self.begin_anew()
        if self._hooks:
            for param in self._params:
                param.grad = None
        self._restore_widths()

    def _restore_widths(self) -> None:
        """Let grads to come have the width that they had without us, where none is there now."""
        for param in self._params:
            if param.grad is None:
                _set_width(param, self._widths[id(param)])


def _narrow(param: Tensor) -> None:
    settled_grads([param])  # summands of a DTensor's grad are not to be rounded
    if param.grad is not None and param.grad.dtype == torch.float32:
        _set_width(param, torch.bfloat16)


def _set_width(param: Tensor, dtype: torch.dtype | None) -> None:
    """Give the grad that is there, and those to come, this dtype."""
    if param.grad_dtype == dtype:
        return
    grad, param.grad = param.grad, None
    param.grad_dtype = dtype
    if grad is not None:
        param.grad = grad.to(dtype or param.dtype)
