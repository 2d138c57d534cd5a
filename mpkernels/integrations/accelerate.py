"""Accelerate, and with it Hugging Face's Trainer: schedules that wait where an overflow has cost a step."""

from typing import Any

from accelerate.optimizer import AcceleratedOptimizer

from mpkernels.optim import AdamW


class _TellsSkips(AcceleratedOptimizer):
    @property
    def step_was_skipped(self) -> bool:
        return bool(self.optimizer.step_was_skipped)  # None as long as nothing is known


def tell_skips(optimizer: Any) -> Any:
    """Makes ``step_was_skipped`` of a prepared ``mpkernels.optim.AdamW`` say what it says. Returns the optimizer.

    Accelerate takes a step for skipped when the scaler did not call it. Optimizers that look for overflow within their
    step, torch's fused ones too, always are called, so that schedulers move on over skips. On a GPU the answer may be
    the one of the step before: it waits for no device.
    """
    is_prepared = isinstance(optimizer, AcceleratedOptimizer)
    kind = type(optimizer.optimizer if is_prepared else optimizer)
    if not is_prepared or not issubclass(kind, AdamW):
        got = f"{kind.__module__}.{kind.__qualname__}, {'prepared' if is_prepared else 'not prepared'}"
        raise TypeError(f"tell_skips: optimizer must be a prepared mpkernels.optim.AdamW, got {got}")
    optimizer.__class__ = _TellsSkips
    return optimizer
