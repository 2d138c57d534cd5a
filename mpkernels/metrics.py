"""Gives loggers a training's numbers without making the host wait for the device."""

from typing import Any

import torch
from torch import Tensor

from mpkernels._shared.parameters import put_on, unwrapped
from mpkernels.optim.readback import Readback
from mpkernels.optim.skipping_optimizer import SkippingOptimizer
from mpkernels.optim.step_hooks import PassiveHook


class Metrics:
    """Follows an optimizer's steps, and gives a logger their gradient norm, loss scale and number of skipped steps.

    >>> metrics = mpkernels.Metrics(optimizer, scaler)
    >>> wandb.log(metrics.read())  # in the training loop, after a step

    Each step copies its numbers from the device in one small copy, and nobody waits for it. A step inside a CUDA graph
    or under torch.compile is not followed.

    Args:
        optimizer: one of ``mpkernels.optim``, or what Accelerate, Lightning or Fabric made of it.
        scaler: the GradScaler that you train with, torch's or ours, if there is one.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None = None) -> None:
        inner = unwrapped(optimizer)
        if not isinstance(inner, SkippingOptimizer):
            kind = type(inner)
            raise TypeError(
                f"Metrics: optimizer must be one of mpkernels.optim, got {kind.__module__}.{kind.__qualname__}"
            )
        if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
            raise TypeError(f"Metrics: scaler must be a torch.amp.GradScaler or None, got {type(scaler).__name__}")
        self._scaler = scaler
        self._names: tuple[str, ...] = ()
        self._readback = Readback()
        self._hook = inner.register_step_post_hook(PassiveHook(self._follow))

    def read(self) -> dict[str, float]:
        """Return ``grad_norm``, ``skipped_steps`` and ``loss_scale`` of the newest step that the device has finished.

        What a step did not compute is left out: the norm and the count without guard, ``max_norm`` or scaler, the scale
        without a scaler. The dict is empty until the device has finished a step that came after these Metrics."""
        arrived = self._readback.read()
        return {} if arrived is None else dict(zip(self._names, arrived.tolist(), strict=True))

    def remove(self) -> None:
        """Stop following the optimizer's steps."""
        self._hook.remove()

    def _follow(self, optimizer: Any) -> None:
        is_captured = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        if is_captured or torch.compiler.is_compiling():
            return
        scaler = self._scaler
        scale: Tensor | None = scaler._scale if scaler is not None and scaler.is_enabled() else None
        all_numbers = {"grad_norm": optimizer.grad_norm, "skipped_steps": optimizer._skips, "loss_scale": scale}
        numbers = {name: number.float() for name, number in all_numbers.items() if number is not None}
        if self._names != tuple(numbers):
            self._names = tuple(numbers)
            self._readback.forget()
        if numbers:
            # A CUDA device if a number lies there, because a copy from it to the CPU would make the host wait.
            device = next((number.device for number in numbers.values() if number.is_cuda), torch.device("cpu"))
            self._readback.send(torch.stack([put_on(device, number) for number in numbers.values()]))
