"""update_scale_: updates the loss scale after a step, by whether the step has overflowed."""

import math
from typing import Any

import torch
from torch import Tensor

from mpkernels.ops import _checks
from mpkernels.ops._registry import define


def _check(scale: Tensor, growth_tracker: Tensor, found_inf: Tensor, *rest: Any) -> None:
    overflows = rest[3]
    _checks.scalar("update_scale_", "scale", scale)
    _checks.scalar("update_scale_", "growth_tracker", growth_tracker, like=scale, dtype=torch.int32)
    _checks.scalar("update_scale_", "found_inf", found_inf, like=scale)
    _checks.contiguous("update_scale_", "overflows", overflows, torch.int32, (2,), scale.device)


@define(
    "update_scale_(Tensor(a!) scale, Tensor(b!) growth_tracker, Tensor found_inf, float growth_factor, "
    "float backoff_factor, int growth_interval, Tensor(c!) overflows, float min_scale, float max_scale, "
    "int hysteresis) -> ()",
    check=_check,
)
def _update_scale(
    scale: Tensor,
    growth_tracker: Tensor,
    found_inf: Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    overflows: Tensor,
    min_scale: float,
    max_scale: float,
    hysteresis: int,
) -> None:
    has_overflowed = found_inf.reshape(()) != 0
    in_a_row = torch.where(has_overflowed, overflows[0].long() + 1, 0)
    backed_off = (scale.double() * backoff_factor).clamp(min=min_scale).float()
    grown = (scale.double() * growth_factor).clamp(max=max_scale).float()
    steps = growth_tracker.long() + 1
    is_due = steps == growth_interval
    without_overflow = torch.where(is_due & grown.isfinite(), grown, scale)
    with_overflow = torch.where(in_a_row >= hysteresis, backed_off, scale)
    scale.copy_(torch.where(has_overflowed, with_overflow, without_overflow))
    growth_tracker.copy_(torch.where(has_overflowed | is_due, 0, steps))
    overflows.copy_(torch.stack((in_a_row, overflows[1] + has_overflowed)))


def update_scale_(
    scale: Tensor,
    growth_tracker: Tensor,
    found_inf: Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    overflows: Tensor,
    min_scale: float = 0.0,
    max_scale: float = math.inf,
    hysteresis: int = 1,
) -> None:
    """Multiply ``scale`` by ``backoff_factor`` after an overflow, by ``growth_factor`` after ``growth_interval``
    steps without one.

    This does what ``torch._amp_update_scale_`` does, to the bit, and also counts overflows. It takes one launch of one
    thread; nothing is copied to the host.

    Args:
        scale: one fp32. A growth that would end in inf is left out.
        growth_tracker: one int32, the steps since the last overflow or growth.
        found_inf: one fp32; anything but 0 is an overflow.
        growth_factor: what the scale is multiplied by when it grows.
        backoff_factor: what the scale is multiplied by after an overflow.
        growth_interval: after how many steps in a row without overflow the scale grows.
        overflows: two int32: how many there have been in a row, and in all.
        min_scale: how far the backoff may go.
        max_scale: how far the growth may go.
        hysteresis: how many overflows in a row it takes for the scale to back off; each further overflow in that
            row makes the scale back off again. Without an overflow the count starts afresh, as in TransformerEngine
            (Megatron's goes on until the scale grows).
    """
    _update_scale(
        scale,
        growth_tracker,
        found_inf,
        growth_factor,
        backoff_factor,
        growth_interval,
        overflows,
        min_scale,
        max_scale,
        hysteresis,
    )
