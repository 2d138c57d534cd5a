"""Moments in 8 bits in torch, as the specification. csrc/step/int8.h explains them."""

import torch
from torch import Tensor

from mpkernels._shared.parameters import order_of_memory

QUANTIZED = 256  # elements that share a scale
SMALLEST_SCALE = 2.0**-126


def decode(codes: Tensor, scales: Tensor, squared: bool) -> Tensor:
    """Return the fp32 values of int8 codes in any shape: of exp_avg, or of exp_avg_sq if they are squared."""
    q = _blocks(codes.float() + (128 if squared else 0))
    root = q * torch.tensor(1 / (255 if squared else 127), dtype=torch.float32, device=q.device)
    values = scales[:, None] * (root * root.abs())
    return _unblocked(values * values if squared else values, codes)


def encode(values: Tensor, squared: bool) -> tuple[Tensor, Tensor]:
    """Return the codes, in the shape and strides of ``values``, which must be dense, and the scales."""
    numbers = _blocks(values.double().sqrt().float() if squared else values)  # an fp32 root is an ulp off at times
    largest = numbers.abs().amax(1)
    scales = torch.where(largest < SMALLEST_SCALE, 0.0, largest)
    inverse = torch.where(scales == 0, 0.0, 1 / scales)
    root = (numbers.abs() * inverse[:, None]).double().sqrt().float()
    q = (root * (255 if squared else 127)).round().nan_to_num(nan=0.0)
    q = torch.where((numbers > 0) & (q == 0), 1, q) - 128 if squared else torch.where(numbers < 0, -q, q)
    return _unblocked(q, values).to(torch.int8), scales


def _blocks(tensor: Tensor) -> Tensor:
    """Return a dense tensor's elements in memory order, a row for each scale; the last row is filled up with zeros."""
    flat = tensor.permute(order_of_memory(tensor)).reshape(-1)
    return torch.nn.functional.pad(flat, (0, -flat.numel() % QUANTIZED)).view(-1, QUANTIZED)


def _unblocked(blocks: Tensor, like: Tensor) -> Tensor:
    """Undo ``_blocks``, in the shape and strides of ``like``."""
    order = order_of_memory(like)
    permuted = blocks.flatten()[: like.numel()].view([like.shape[i] for i in order])
    return permuted.permute(sorted(range(like.dim()), key=order.__getitem__))
