"""autocast around an op and within it."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from mpkernels.ops._stack import DEVICES


def has_autocast(device_type: str) -> bool:
    """Return what ``torch.amp.is_autocast_available`` does, which torch 2.10 can't compile."""
    return device_type in DEVICES or torch.amp.is_autocast_available(device_type)


def without_autocast(like: Tensor) -> AbstractContextManager[Any]:
    device = like.device.type
    return torch.autocast(device, enabled=False) if has_autocast(device) else nullcontext()
