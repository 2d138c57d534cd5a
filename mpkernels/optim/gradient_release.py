"""Frees grads inside the backward, for release_grads: each is kept in 16 bits, or its parameter steps alone."""

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from mpkernels._shared.parameters import params_of, set_grad_dtype
from mpkernels._torch_private.sharded import is_fsdp1s
from mpkernels._torch_private.tensors import is_backward_nested
from mpkernels.distributed import ddp
from mpkernels.distributed.parts import await_grad, settled_grads
from mpkernels.optim import group_options
from mpkernels.optim.masters import needs_master
from mpkernels.optim.offload.grads import HostGrads

Release = Callable[[Tensor], None]

_last_release = WeakIdKeyDictionary()  # of each parameter, as a weak reference: its hooks keep it alive

_SUMMED_UP = (
    "which sums up grads after they are released; leave it out, or end it by the remove() of what release_grads "
    "returned"
)


class GradientRelease:
    """The handle that ``release_grads`` returns: ``accumulate()`` pauses the freeing of grads, ``remove()`` ends it."""

    def __init__(
        self, op: str, releases: Sequence[tuple[Tensor, Release | None]], on_host: HostGrads | None = None
    ) -> None:
        """releases: each parameter, with the function to call once its grad is complete. None keeps the grad in 16 bits
        until the step. on_host: where all grads go instead, to be added up in fp32 and to wait for the step."""
        self._op, self._on_host = op, on_host
        self.steps_alone = on_host is None and any(release is not None for _, release in releases)  # in the backward
        self._widths: dict[Tensor, torch.dtype | None] = {}  # each parameter's grad_dtype without us
        self._is_accumulating = False
        self._have_come: set[Tensor] = set()  # parameters whose grads have come since the last step or zero_grad
        if any(is_fsdp1s(param) for param, _ in releases):
            raise ValueError(f"{op}: params must not be FSDP's, which frees grads itself; leave it out")
        ddp.watch()
        self._wrappers = 0  # how many existed at the last check that none has these parameters
        self._hooks: list[Any] = []
        for param, release in releases:
            self._add(param, release or _narrow)

    def add_to_host(self, params: Sequence[Tensor]) -> None:
        """Send the grads of these parameters to the host, too, if the other grads go there."""
        if self._on_host is None:
            return
        for param in params:
            if param.requires_grad:
                self._add(param, self._on_host.take)

    def _add(self, param: Tensor, release: Release) -> None:
        self._widths[param] = param.grad_dtype
        self._hooks.append(param.register_post_accumulate_grad_hook(self._hook(release)))
        _last_release[param] = weakref.ref(self)

    def _hook(self, release: Release) -> Release:
        def after_accumulation(param: Tensor) -> None:
            if self._wrappers != ddp.made():
                ddp.refuse(self._op, list(self._widths), _SUMMED_UP)
                self._wrappers = ddp.made()
            if self._is_accumulating and self._on_host is None:
                return
            if self.steps_alone:
                self._refuse_second(param)
                if is_backward_nested():
                    return  # another checkpoint may use the parameter yet, and compute its forward anew
            await_grad(param)
            release(param)

        return after_accumulation

    def _refuse_second(self, param: Tensor) -> None:
        """Raise if the parameter has had a grad since the last step or zero_grad: else one step would take it twice."""
        if param in self._have_come:
            place = next(i for i, each in enumerate(self._widths) if each is param)
            raise RuntimeError(
                f"{self._op}: params[{place}] of shape {tuple(param.shape)} must get its grad once before "
                "each step, got a second one; give reentrant checkpoints that share it use_reentrant=False, and run "
                "all backwards before a step but the last inside the accumulate() of what release_grads returned; "
                "after a failed backward, call the optimizer's zero_grad() or step()"
            )
        self._have_come.add(param)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Keep the grads of a backward, so that the next one adds to them. Put every backward but the last one before a
        step inside this context. Grads that go to the host are added up there, inside this context and outside."""
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
        self._hooks, self.steps_alone, self._on_host = [], False, None
        for param, width in self._widths.items():
            set_grad_dtype(param, width)

    @property
    def is_on(self) -> bool:
        """Whether grads are freed: until ``remove``."""
        return bool(self._hooks)

    @property
    def adds_up(self) -> bool:
        """Whether the grads of several backwards are added up in fp32, on the host."""
        return self._on_host is not None

    def begin_anew(self) -> None:
        """Let each parameter get its grad again, as after a step. A backward that has failed is given up."""
        self._have_come.clear()
        if self._on_host is not None:
            self._on_host.forget()

    def after_step(self, optimizer: Any) -> None:
        self.begin_anew()
        handed = optimizer.handed_over()
        if self.steps_alone and (handed.grad_scale is not None or handed.found_inf is not None):
            raise RuntimeError(
                f"{self._op}: scaler must be the one that you train with, got none, so the backward has stepped with "
                "grads that hold the loss scale; go back to a checkpoint and call release_grads(scaler=scaler)"
            )
        if self.is_on:
            for param in self._widths:
                param.grad = None
        self._restore_widths()

    def _restore_widths(self) -> None:
        """Let later grads of parameters that have none now come in the dtype that they had without us."""
        for param, width in self._widths.items():
            if param.grad is None:
                set_grad_dtype(param, width)


def releases_of(params: Iterable[Tensor]) -> list[GradientRelease]:
    """Return what frees the grads of these parameters now."""
    found = [known() for param in params if (known := _last_release.get(param)) is not None]
    return [release for release in dict.fromkeys(found) if release is not None and release.is_on]


def end_earlier_releases(name: str, params: Iterable[Tensor]) -> None:
    """End what an earlier optimizer's release_grads does to these parameters: it would go on to step them, also where
    nobody holds that optimizer any more."""
    for release in releases_of(params):
        release.remove()
        warnings.warn(
            f"{name}: params have an earlier optimizer whose release_grads() steps or frees their grads; it has been "
            "ended, for this optimizer would get none",
            stacklevel=2,
        )


def _narrow(param: Tensor) -> None:
    settled_grads([param])  # adds up summands of a DTensor's grad before rounding
    if param.grad is not None and param.grad.dtype == torch.float32:
        set_grad_dtype(param, torch.bfloat16)


def releases_in_backward(
    optimizer: Any, scaler: torch.amp.GradScaler | None, on_host: HostGrads | None
) -> list[tuple[Tensor, Release | None]]:
    """Return each parameter with the function that steps it alone, or that sends its grad to the host; None where a
    step needs all grads first."""
    name, params = type(optimizer).__name__, params_of(optimizer)
    if optimizer.defaults.get("differentiable"):
        raise ValueError(f"{name}: release_grads needs differentiable=False")
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise TypeError(f"{name}: release_grads takes a GradScaler, got {type(scaler).__name__}")
    group_options.refuse_twice(name, params)
    if on_host is not None:
        return [(param, on_host.take) for param in params if param.requires_grad]
    waits = optimizer.is_guarded(any(map(needs_master, params))) or (scaler is not None and scaler.is_enabled())
    if not waits:
        optimizer.refuse_to_step_alone()
    return [
        (param, None if waits else partial(optimizer.step_alone, i, j))
        for i, group in enumerate(optimizer.param_groups)
        for j, param in enumerate(group["params"])
        if param.requires_grad
    ]
