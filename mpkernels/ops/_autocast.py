"""autocast around an op and within it."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def has_autocast(device_type: str) -> bool:
    """``torch.amp.is_autocast_available``, which torch 2.10 can't compile."""
    return torch.amp.is_autocast_available(device_type)


def without_autocast(like: Tensor) -> AbstractContextManager[Any]:
    device = like.device.type
    return torch.autocast(device, enabled=False) if has_autocast(device) else nullcontext()
