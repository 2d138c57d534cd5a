"""Reads dtypes that a config gives by their names."""

from typing import Any

import torch

_SHORT = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


def dtype_of(value: Any) -> Any:
    """Return the dtype that has this name, such as "bfloat16", "torch.bfloat16" or "bf16"; anything else as it is."""
    if not isinstance(value, str):
        return value
    name = value.removeprefix("torch.")
    found = getattr(torch, _SHORT.get(name, name), None)
    return found if isinstance(found, torch.dtype) else value
