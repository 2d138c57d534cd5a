"""Tells where autocast exists, and disables it while an op computes."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from mpkernels.ops._dispatcher import DEVICES


def has_autocast(device_type: str) -> bool:
    """Return what ``torch.amp.is_autocast_available`` does, which torch 2.10 can't compile."""
    return device_type in DEVICES or torch.amp.is_autocast_available(device_type)


@contextmanager
def without_autocast(like: Tensor) -> Iterator[None]:
    """Disable autocast in this context. This doesn't use torch.autocast: when the outermost one ends, for instance in a
    thread that runs a backward on a GPU, torch drops the casts of all threads."""
    device = like.device.type
    if not has_autocast(device) or not torch.is_autocast_enabled(device):
        yield
        return
    torch.set_autocast_enabled(device, False)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, True)
