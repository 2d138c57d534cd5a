"""What a scaler sets on an optimizer for the time of a step, as torch's does."""

from typing import Any

from torch.optim import Optimizer

NAMES = ("grad_scale", "found_inf", "outcome", "peers")


def take_back(optimizer: Optimizer) -> None:
    """Remove what a scaler has set on the optimizer."""
    for name in NAMES:
        attributes_of(optimizer).pop(name, None)


def attributes_of(optimizer: Optimizer) -> dict[str, Any]:
    """Return an object's own attributes; of a class with __slots__, none."""
    return getattr(optimizer, "__dict__", {})


def is_a_wrapper(optimizer: Optimizer) -> bool:
    """Return whether this optimizer forwards attribute reads to another one. The inner optimizer would never see the
    attributes that a scaler sets on the outer one."""
    flag, kind = "_step_supports_amp_scaling", type(optimizer)
    is_own = hasattr(kind, flag) or flag in attributes_of(optimizer)
    return not is_own and getattr(optimizer, flag, False) and kind.__setattr__ is object.__setattr__
