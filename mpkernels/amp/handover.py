"""What a scaler sets on an optimizer for the time of a step, as torch's does."""

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from mpkernels.distributed.processes import Processes

NAMES = ("grad_scale", "found_inf", "outcome", "peers")


def give(optimizer: Any, scale: Tensor, peers: Processes | None, outcome: Tensor | None) -> None:
    """Set what our AdamW's step needs to unscale, to look for inf and NaN in all processes, and to report."""
    attributes_of(optimizer).pop("found_inf", None)  # torch's scaler sets its own there
    if peers is not None:
        optimizer.peers = peers
    preset = getattr(optimizer, "grad_scale", None)
    optimizer.grad_scale = scale if preset is None else scale * preset
    # The optimizer writes to this tensor: attributes that compiled code sets are lost outside of it.
    optimizer.outcome = outcome


def take_back(optimizer: Optimizer) -> None:
    """Remove what a scaler has set on the optimizer."""
    for name in NAMES:
        attributes_of(optimizer).pop(name, None)


def attributes_of(optimizer: Optimizer) -> dict[str, Any]:
    """Return an object's own attributes; none if its class has __slots__."""
    return getattr(optimizer, "__dict__", {})


def is_a_wrapper(optimizer: Optimizer) -> bool:
    """Return whether this optimizer forwards attribute reads to another one. The inner optimizer would never see the
    attributes that a scaler sets on the outer one."""
    flag, kind = "_step_supports_amp_scaling", type(optimizer)
    is_own = hasattr(kind, flag) or flag in attributes_of(optimizer)
    return not is_own and getattr(optimizer, flag, False) and kind.__setattr__ is object.__setattr__
