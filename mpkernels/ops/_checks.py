"""Checks of arguments. Each error names the op, the argument, what was wanted and what came."""

import inspect
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

Init = TypeVar("Init", bound=Callable[..., None])


def suggests_options(init: Init) -> Init:
    """Have a constructor's error about an unknown option name the one that was meant, as Python does from 3.13 on."""
    known = [name for name in inspect.signature(init).parameters if name != "self"]

    @wraps(init)
    def checked(self: Any, *args: Any, **options: Any) -> None:
        for name in options.keys() - set(known):
            like = get_close_matches(name, known, n=1)
            hint = f". Did you mean {like[0]!r}?" if like else ""
            raise TypeError(f"{init.__qualname__}() got an unexpected keyword argument {name!r}{hint}")
        init(self, *args, **options)

    return checked  # type: ignore[return-value]


def tensor(op: str, name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, got {type(value).__name__}")


def scalar(op: str, name: str, value: Tensor, like: Tensor | None = None, dtype: torch.dtype = torch.float32) -> None:
    """Require a tensor with one element, on the device of ``like`` if that is given."""
    tensor(op, name, value)
    if value.dtype != dtype:
        raise TypeError(f"{op}: {name} must be {dtype}, got {value.dtype}")
    if value.layout != torch.strided or value.numel() != 1:
        raise ValueError(f"{op}: {name} must be a tensor of one element, got shape {tuple(value.shape)}")
    if like is not None and value.device != like.device:
        raise ValueError(f"{op}: {name} must be on {like.device}, got {value.device}")


def dense(op: str, name: str, value: Tensor, dtypes: Sequence[torch.dtype]) -> None:
    tensor(op, name, value)
    if value.layout != torch.strided:
        raise TypeError(f"{op}: {name} must be dense, got layout {value.layout}")
    if value.dtype not in dtypes:
        known = "fp16, bf16, fp32, fp64" if dtypes is FLOATS else ", ".join(map(str, dtypes))
        raise TypeError(f"{op}: {name} must be one of {known}, got {value.dtype}")


def contiguous(
    op: str, name: str, value: Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device
) -> None:
    tensor(op, name, value)
    if value.dtype != dtype:
        raise TypeError(f"{op}: {name} must be {dtype}, got {value.dtype}")
    if value.device != device:
        raise ValueError(f"{op}: {name} must be on {device}, got {value.device}")
    if value.shape != shape or not value.is_contiguous():
        got = f"shape {tuple(value.shape)}, strides {value.stride()}"
        raise ValueError(f"{op}: {name} must be contiguous, of shape {shape}, got {got}")


def tensors(
    op: str,
    name: str,
    value: Sequence[Tensor],
    *,
    device: torch.device | None = None,
    dtypes: Sequence[torch.dtype] = FLOATS,
    writable: bool = False,
) -> None:
    """Require a list of dense tensors on one device."""
    if isinstance(value, Tensor) or not isinstance(value, Sequence):
        raise TypeError(f"{op}: {name} must be a list of tensors, got {type(value).__name__}")
    for i, item in enumerate(value):
        who = f"{name}[{i}]"
        dense(op, who, item, dtypes)
        device = device or item.device
        if item.device != device:
            raise ValueError(f"{op}: {who} must be on {device}, got {item.device}")
        if writable and any(size > 1 and stride == 0 for size, stride in zip(item.shape, item.stride(), strict=True)):
            raise ValueError(f"{op}: {who} must not share memory between its elements, got strides {item.stride()}")


def matrix(op: str, name: str, value: Tensor, shape: Sequence[int | None] | None, like: Tensor | None) -> None:
    """Require a dense tensor of floats with this shape, and the dtype and device of ``like``. In ``shape``, None allows
    any size; without a shape, any matrix is allowed."""
    dense(op, name, value, FLOATS)
    shape = (None, None) if shape is None else shape
    if len(shape) != value.dim() or any(want not in (None, got) for want, got in zip(shape, value.shape, strict=True)):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{op}: {name} must have shape ({wanted}), got {tuple(value.shape)}")
    if like is not None and value.dtype != like.dtype:
        raise TypeError(f"{op}: {name} must be {like.dtype}, got {value.dtype}")
    if like is not None and value.device != like.device:
        raise ValueError(f"{op}: {name} must be on {like.device}, got {value.device}")


def gradient_dtype(op: str, name: str, value: torch.dtype | None, like: Tensor) -> None:
    """Refuse a dtype that is neither that of ``like`` nor fp32 nor None."""
    wanted = dict.fromkeys((like.dtype, torch.float32))
    if value is not None and value not in wanted:
        raise TypeError(f"{op}: {name} must be {' or '.join(map(str, wanted))}, got {value}")
