"""Checks GradScaler's options on how the loss scale moves, makes schedules from them, and sets a scale."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mpkernels._shared.parameters import put_on
from mpkernels._torch_private.tracing import is_known_to_host

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
_SCALE = "a finite fp32 number above 0"
BEYOND_TORCH = ("min_scale", "max_scale", "hysteresis")


def check(scaling: Scaling, options: dict[str, Any], enabled: bool) -> Schedule | None:
    """Return the schedule, if there is one. ``options`` has the keys of DEFAULTS. A scaler that isn't ``enabled`` takes
    any value for torch's options, as torch's does."""
    for name, value in options.items():
        if enabled or name in BEYOND_TORCH:
            if not hasattr(value, "__float__"):
                raise TypeError(f"GradScaler: {name} must be a number, got {value!r}")
            _require(value == value, name, "a number", value)
    low, first, high = options["min_scale"], options["init_scale"], options["max_scale"]
    if enabled:
        _require(is_scale(first), "init_scale", _SCALE, first)
        interval = options["growth_interval"]
        _require(hasattr(interval, "__index__"), "growth_interval", "an int", interval)
    if scaling == "dynamic":
        _require(low >= 0, "min_scale", "0 or more", low)
        _require(high >= low, "max_scale", f"min_scale, {low}, or more", high)
        is_bounded = (low, high) != (DEFAULTS["min_scale"], DEFAULTS["max_scale"])
        _require(not enabled or not is_bounded or low <= first <= high, "init_scale", f"from {low} to {high}", first)
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
    in_range = all(is_scale(scale) for _, scale in scaling)
    _require(in_range, "scaling", "finite fp32 scales above 0", scaling)
    return Steps(scaling)


def is_scale(number: float | Tensor) -> bool:
    """Return whether a number is a finite one above 0 in fp32."""
    return bool(2.0**-149 <= number <= torch.finfo(torch.float32).max)


def scale_at(schedule: Schedule, updates: int) -> float:
    """Return the scale of a schedule, which a user's function may get wrong."""
    scale = schedule(updates)
    if not isinstance(scale, int | float) or not is_scale(scale):
        raise ValueError(
            f"GradScaler: scaling must return finite fp32 scales above 0, got {scale} after {updates} updates"
        )
    return scale


def set_to(new_scale: float | Tensor, scale: Tensor, low: float, high: float) -> None:
    """Set a scale to a number, or to the value of a tensor of one element, within bounds. What the host doesn't know,
    because it is on another device, is taken unchecked."""
    if isinstance(new_scale, int | float) and not isinstance(new_scale, bool):
        bounded = min(max(new_scale, low), high)
        if not is_scale(bounded):
            raise ValueError(f"GradScaler.update: new_scale must be {_SCALE}, got {new_scale!r}")
        scale.fill_(bounded)
        return
    if not isinstance(new_scale, Tensor) or new_scale.numel() != 1 or new_scale.requires_grad:
        raise AssertionError(
            "new_scale should be a float or a 1-element torch.cuda.FloatTensor or "
            "torch.FloatTensor with requires_grad=False."
        )
    if is_known_to_host(new_scale):
        set_to(float(new_scale), scale, low, high)
        return
    scale.copy_(put_on(scale.device, new_scale.reshape(())))
    if (low, high) != (0.0, math.inf):
        scale.clamp_(low, high)


class Steps:
    """A schedule that sets a new scale at given steps. It is a class because scalers must be picklable."""

    def __init__(self, scales: Sequence[tuple[int, float]]) -> None:
        self.scales = [(step, float(scale)) for step, scale in scales]

    def __call__(self, step: int) -> float:
        return next(scale for first, scale in reversed(self.scales) if first <= step)


def _require(met: bool, name: str, wanted: str, got: object) -> None:
    if not met:
        raise ValueError(f"GradScaler: {name} must be {wanted}, got {got!r}")
