"""torch's autocast, with the machine's device as its default."""

from typing import Any

import torch

from mpkernels._shared.dtypes import dtype_of


def machines_device() -> str:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None else accelerator.type


def check_device(op: str, device: object) -> None:
    """Raise if torch knows no such device."""
    if not isinstance(device, str | torch.device):
        raise TypeError(f"{op}: device must be a type of device, such as 'cuda', got {device!r}")
    try:
        torch.device(device)
    except RuntimeError:
        raise ValueError(f"{op}: device must be a type of device, such as 'cuda', got {device!r}") from None


def autocast(*arguments: Any, **keywords: Any) -> torch.amp.autocast:
    """Return a ``torch.amp.autocast``. Without ``device_type`` it is for the machine's accelerator, or the CPU.
    A dtype may be given by its name, such as ``"bf16"``.

    >>> with autocast(dtype=torch.bfloat16): ...

    If the first argument is a bool, the arguments are enabled, dtype and cache_enabled, in the order of the old
    ``torch.cuda.amp.autocast``.
    """
    arguments, keywords = tuple(map(dtype_of, arguments)), {key: dtype_of(it) for key, it in keywords.items()}
    if arguments and isinstance(arguments[0], bool):
        keywords_of_old = dict(zip(("enabled", "dtype", "cache_enabled"), arguments, strict=False))
        for name in keywords_of_old.keys() & keywords.keys():  # Python's own error is a KeyError in an except clause
            raise TypeError(f"autocast() got multiple values for argument {name!r}")
        return torch.amp.autocast(machines_device(), **keywords_of_old, **keywords)
    if not arguments and "device_type" not in keywords:
        return torch.amp.autocast(machines_device(), **keywords)
    return torch.amp.autocast(*arguments, **keywords)
