"""Divides parameters into buckets, whose grads or states travel together."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mpkernels._shared.parameters import real, real_values


def in_buckets(places: Sequence[int], sizes: Sequence[int], most: int) -> Iterator[list[int]]:
    """Yield neighbours that together have at most so many bytes, or one alone that has more."""
    bucket: list[int] = []
    total = 0
    for place, size in zip(places, sizes, strict=True):
        if bucket and total + size > most:
            yield bucket
            bucket, total = [], 0
        bucket.append(place)
        total += size
    yield bucket


def in_order_of(param: Tensor, grad: Tensor) -> Tensor:
    """Return the grad in the order of its parameter's memory."""
    grad, param = real_values(grad), real(param)
    if grad.stride() == param.stride() or grad.shape != param.shape:  # then the step says so
        return grad
    return torch.empty_like(param, dtype=grad.dtype, device=grad.device).copy_(grad)
