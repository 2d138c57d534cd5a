"""What users are told about bad arguments: op, argument, what was wanted, what came."""

from collections.abc import Sequence

import torch
from torch import Tensor

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def tensor(op: str, name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, got {type(value).__name__}")


def scalar(op: str, name: str, value: Tensor, like: Tensor | None = None) -> None:
    """A single fp32, on the device of ``like`` where that is given."""
    tensor(op, name, value)
    if value.dtype != torch.float32:
        raise TypeError(f"{op}: {name} must be torch.float32, got {value.dtype}")
    if value.layout != torch.strided or value.numel() != 1:
        raise ValueError(f"{op}: {name} must be a tensor of one element, got shape {tuple(value.shape)}")
    if like is not None and value.device != like.device:
        raise ValueError(f"{op}: {name} must be on {like.device}, got {value.device}")


def grads(
    op: str,
    value: Sequence[Tensor],
    device: torch.device | None = None,
    writable: bool = False,
    at_least_one: bool = False,
) -> None:
    """A list of strided float tensors on one device."""
    if isinstance(value, Tensor) or not isinstance(value, Sequence):
        raise TypeError(f"{op}: grads must be a list of tensors, got {type(value).__name__}")
    if at_least_one and not value:
        raise ValueError(f"{op}: grads must hold at least one tensor, got an empty list")
    for i, grad in enumerate(value):
        name = f"grads[{i}]"
        tensor(op, name, grad)
        if grad.layout != torch.strided:
            raise TypeError(f"{op}: {name} must be dense, got layout {grad.layout}")
        if grad.dtype not in FLOATS:
            raise TypeError(f"{op}: {name} must be one of fp16, bf16, fp32, fp64, got {grad.dtype}")
        device = device or grad.device
        if grad.device != device:
            raise ValueError(f"{op}: {name} must be on {device}, got {grad.device}")
        if writable and any(size > 1 and stride == 0 for size, stride in zip(grad.shape, grad.stride(), strict=True)):
            raise ValueError(f"{op}: {name} must not share memory between its elements, got strides {grad.stride()}")
