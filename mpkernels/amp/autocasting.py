"""torch's autocast, on the device that is there."""

from typing import Any

import torch


def machines_device() -> str:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None else accelerator.type


def autocast(*arguments: Any, **keywords: Any) -> torch.amp.autocast:
    """``torch.amp.autocast``, on the machine's device unless ``device_type`` says otherwise.

    >>> with autocast(dtype=torch.bfloat16): ...

    A leading bool means ``enabled``, then dtype and cache_enabled, as in the old ``torch.cuda.amp.autocast``.
    """
    if arguments and isinstance(arguments[0], bool):
        keywords_of_old = dict(zip(("enabled", "dtype", "cache_enabled"), arguments, strict=False))
        return torch.amp.autocast(machines_device(), **keywords_of_old, **keywords)
    if not arguments and "device_type" not in keywords:
        return torch.amp.autocast(machines_device(), **keywords)
    return torch.amp.autocast(*arguments, **keywords)
