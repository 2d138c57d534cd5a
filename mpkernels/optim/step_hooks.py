"""Tells what runs around an optimizer's step, or in its place: hooks, and a subclass's own step."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from mpkernels._torch_private.optimizers import hooks_around_step, is_profiling, post_hooks_of_step

Step = TypeVar("Step", bound=Callable[..., Any])
_RUNS_HOOKS = Optimizer.profile_hook_step(lambda self: None).__code__  # of the function that torch puts around a step


def with_hooks(step: Step) -> Step:
    """Have hooks and profilers see this step, as torch does for each optimizer. Where there are none, as nearly always,
    this skips what torch does for them, which a step of a few small parameters would notice."""
    watched = Optimizer.profile_hook_step(step)

    @wraps(step)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        has_watched = getattr(type(self).step, "__code__", None) is _RUNS_HOOKS  # a subclass's step has called this
        may_be_watched = torch.compiler.is_compiling() or is_profiling() or any(hooks_around_step(self))
        is_watched = may_be_watched and not has_watched
        return (watched if is_watched else step)(self, *args, **kwargs)

    run.hooked = True  # type: ignore[attr-defined]  # torch leaves it as it is
    return run  # type: ignore[return-value]


class PassiveHook:
    """A hook of ours that doesn't look at grads, so they may still be scaled. It is called after skipped steps, too."""

    def __init__(self, function: Callable[[Any], object]) -> None:
        self._function = function

    def __call__(self, optimizer: Any, args: Any = (), kwargs: Any = None) -> None:
        self._function(optimizer)


def see_grads(optimizer: Any) -> bool:
    """Return whether others may look at the grads in a step: hooks of the optimizer or of all, or a subclass's step.
    Functions that LR schedulers, torch.compile or Accelerate set on the optimizer itself don't count."""
    kind, (before, after) = type(optimizer), hooks_around_step(optimizer)
    return kind.step is not kind.our_step or not all(map(_is_passive, before + after))


def may_change_grads(optimizer: Any) -> bool:
    """Return whether hooks or a subclass's step come before the step that uses the grads."""
    kind, (before, _) = type(optimizer), hooks_around_step(optimizer)
    return kind.step is not kind.our_step or not all(map(_is_passive, before))


def _is_passive(hook: Any) -> bool:
    return isinstance(hook, PassiveHook) or getattr(hook, "__module__", None) == "torch.profiler"  # which counts steps


def tell_of_skip(optimizer: Any) -> None:
    """Call our own hooks that follow the optimizer's steps, after a step that a scaler has skipped."""
    for hook in post_hooks_of_step(optimizer):
        if isinstance(hook, PassiveHook):
            hook(optimizer)


def refuse_capture(name: str, params: Sequence[Tensor]) -> None:
    if any(param.is_cuda for param in params) and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{name}: a step with hooks or of a subclass can't be captured in a CUDA graph under a scaler, because the "
            "host must know whether to skip them; remove them, and clip by max_norm"
        )
