"""Accelerate, and with it Hugging Face's Trainer: schedules that wait where an overflow has cost a step."""

from typing import Any

from accelerate.optimizer import AcceleratedOptimizer

from mpkernels.optim.skipping_optimizer import SkippingOptimizer


class _TellsSkips(AcceleratedOptimizer):
    @property
    def step_was_skipped(self) -> bool:
        return bool(self.optimizer.step_was_skipped)  # it is None until the first answer has arrived


def tell_skips(optimizer: Any) -> Any:
    """Make ``step_was_skipped`` of an optimizer prepared by Accelerate return that of the optimizer of
    ``mpkernels.optim`` inside. Return the optimizer.

    Accelerate assumes that a step was skipped if the scaler did not call it. Optimizers that check for overflow inside
    their step are always called, torch's fused ones as well, so schedulers would advance on skipped steps. On a GPU the
    answer may be about the step before, because it doesn't wait for the device.
    """
    is_prepared = isinstance(optimizer, AcceleratedOptimizer)
    kind = type(optimizer.optimizer if is_prepared else optimizer)
    if not is_prepared or not issubclass(kind, SkippingOptimizer):
        got = f"{kind.__module__}.{kind.__qualname__}, {'prepared' if is_prepared else 'not prepared'}"
        raise TypeError(f"tell_skips: optimizer must be one of mpkernels.optim, prepared, got {got}")
    optimizer.__class__ = _TellsSkips
    return optimizer
