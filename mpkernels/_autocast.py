"""torch's autocast, on the device that is there."""

from typing import Any

import torch


def machines_device() -> str:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None else accelerator.type


class autocast(torch.amp.autocast):  # noqa: N801, its name is torch's
    """``torch.amp.autocast``, on the machine's device unless ``device_type`` says otherwise.

    >>> with autocast(dtype=torch.bfloat16): ...

    A leading bool means ``enabled``, then dtype and cache_enabled, as in the old ``torch.cuda.amp.autocast``.
    """

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        if arguments and isinstance(arguments[0], bool):
            arguments, keywords = (), _as_of_old(*arguments, **keywords)
        if not arguments and "device_type" not in keywords:
            keywords["device_type"] = machines_device()
        super().__init__(*arguments, **keywords)


def _as_of_old(
    enabled: bool, dtype: torch.dtype | None = None, cache_enabled: bool | None = None, **keywords: Any
) -> dict[str, Any]:
    return {"enabled": enabled, "dtype": dtype, "cache_enabled": cache_enabled, **keywords}
