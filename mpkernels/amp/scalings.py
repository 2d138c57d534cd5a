"""Checks GradScaler's options on how the loss scale moves, makes schedules from them, and sets a scale."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mpkernels._shared.parameters import put_on

Schedule = Callable[[int], float]
Scaling = str | Schedule | Sequence[tuple[int, float]]

DEFAULTS = {
    "init_scale": 2.0**16,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 2000,
    "min_scale": 0.0,
    "max_scale": math.inf,
    "hysteresis": 1,
}
_SMALLEST, _LARGEST = 2.0**-149, torch.finfo(torch.float32).max
BEYOND_TORCH = ("min_scale", "max_scale", "hysteresis")


def check(scaling: Scaling, options: dict[str, Any]) -> Schedule | None:
    """Return the schedule, if there is one. ``options`` has the keys of DEFAULTS."""
    if scaling == "dynamic":
        low, first, high = options["min_scale"], options["init_scale"], options["max_scale"]
        _require(low >= 0, "min_scale", "0 or more", low)
        _require(high >= low, "max_scale", f"min_scale, {low}, or more", high)
        is_bounded = (low, high) != (DEFAULTS["min_scale"], DEFAULTS["max_scale"])
        _require(not is_bounded or low <= first <= high, "init_scale", f"from {low} to {high}", first)
        hysteresis = options["hysteresis"]
        _require(isinstance(hysteresis, int) and hysteresis >= 1, "hysteresis", "an int, 1 or more", hysteresis)
        return None
    is_static = scaling == "static"
    schedule = None if is_static else _schedule(scaling)
    for name, value in options.items():
        if name != "init_scale" or schedule is not None:
            how = "scaling='static'" if is_static else "a schedule"
            _require(value == DEFAULTS[name], name, f"left at {DEFAULTS[name]} with {how}", value)
    return schedule


def _schedule(scaling: Any) -> Schedule:
    if callable(scaling):
        schedule: Schedule = scaling
        return schedule
    wanted = "'dynamic', 'static', a callable or a list of (step, scale)"
    is_list = isinstance(scaling, Sequence) and not isinstance(scaling, str) and len(scaling) > 0
    _require(is_list and all(isinstance(it, Sequence) and len(it) == 2 for it in scaling), "scaling", wanted, scaling)
    steps = [step for step, _ in scaling]
    _require(steps[0] == 0 and steps == sorted(set(steps)), "scaling", "steps that ascend from 0", scaling)
    in_range = all(_SMALLEST <= scale <= _LARGEST for _, scale in scaling)
    _require(in_range, "scaling", "finite fp32 scales above 0", scaling)
    return Steps(scaling)


def scale_at(schedule: Schedule, updates: int) -> float:
    """Return the scale of a schedule, which a user's function may get wrong."""
    scale = schedule(updates)
    if not isinstance(scale, int | float) or not _SMALLEST <= scale <= _LARGEST:
        raise ValueError(
            f"GradScaler: scaling must return finite fp32 scales above 0, got {scale} after {updates} updates"
        )
    return scale


def set_to(new_scale: float | Tensor, scale: Tensor) -> None:
    """Set a scale to a number, or to the value of a tensor of one element."""
    if isinstance(new_scale, int | float) and not isinstance(new_scale, bool):
        scale.fill_(new_scale)
        return
    if not isinstance(new_scale, Tensor) or new_scale.numel() != 1 or new_scale.requires_grad:
        raise AssertionError(
            "new_scale should be a float or a 1-element torch.cuda.FloatTensor or "
            "torch.FloatTensor with requires_grad=False."
        )
    scale.copy_(put_on(scale.device, new_scale.reshape(())))


class Steps:
    """A schedule that sets a new scale at given steps. It is a class because scalers must be picklable."""

    def __init__(self, scales: Sequence[tuple[int, float]]) -> None:
        self.scales = [(step, float(scale)) for step, scale in scales]

    def __call__(self, step: int) -> float:
        return next(scale for first, scale in reversed(self.scales) if first <= step)


def _require(met: bool, name: str, wanted: str, got: object) -> None:
    if not met:
        raise ValueError(f"GradScaler: {name} must be {wanted}, got {got!r}")
