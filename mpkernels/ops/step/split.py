"""How a 16-bit weight's fp32 master is kept, as csrc/step/split.h explains it: here in torch, as the specification."""

import torch
from torch import Tensor


def split(master: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the 16-bit weight and the int16 remainder of an fp32 master."""
    return _split_bf16(master) if dtype == torch.bfloat16 else _split_fp16(master)


def join(weight: Tensor, remainder: Tensor) -> Tensor:
    """Return the fp32 master of a 16-bit weight and its remainder."""
    return (_join_bf16 if weight.dtype == torch.bfloat16 else _join_fp16)(weight, remainder)


def copied_master(weight: Tensor, copy: Tensor) -> Tensor:
    """Return the fp32 master of a 16-bit weight and the copy of one, which holds where it rounds to the weight."""
    is_its = copy.to(weight.dtype).view(torch.int16) == weight.view(torch.int16)
    return torch.where(is_its, copy, weight.float())


def _split_bf16(master: Tensor) -> tuple[Tensor, Tensor]:
    bits = master.view(torch.int32)
    nan = master.isnan()
    weight = torch.where(nan, bits >> 16 | 0x40, bits + 0x8000 >> 16)
    remainder = torch.where(nan, 0, bits & 0xFFFF)
    return weight.to(torch.int16).view(torch.bfloat16), remainder.to(torch.int16)


def _join_bf16(weight: Tensor, remainder: Tensor) -> Tensor:
    alone = weight.view(torch.int16).int() << 16
    joined = alone + remainder.int()
    is_beyond_inf = weight.isinf() & (remainder > 0)
    return torch.where(is_beyond_inf | ((joined ^ alone) < 0), alone, joined).view(torch.float32)


def _unit_of_fp16(weight: Tensor) -> Tensor:
    """Return a 2^-16th of the weight's last place."""
    exponent = weight.view(torch.int16).int() >> 10 & 0x1F
    return (exponent.clamp(min=1) + 86 << 23).view(torch.float32)


def _split_fp16(master: Tensor) -> tuple[Tensor, Tensor]:
    magnitude = master.abs()
    nearest = magnitude.half()
    is_tie = (magnitude - nearest.float()) / _unit_of_fp16(nearest) >= 32768
    weight = (nearest.view(torch.int16) + is_tie.to(torch.int16)).view(torch.float16)
    remainder = ((magnitude - weight.float()) / _unit_of_fp16(weight)).round().clamp(max=32767)
    remainder = torch.where(weight.isfinite(), remainder, 0).to(torch.int16)
    sign = master.view(torch.int32) >> 16 & 0x8000
    return (weight.view(torch.int16) | sign.to(torch.int16)).view(torch.float16), remainder


def _join_fp16(weight: Tensor, remainder: Tensor) -> Tensor:
    alone = weight.abs().float()
    beyond = remainder.float() * _unit_of_fp16(weight)
    is_power = (alone > 2**-14) & (weight.view(torch.int16) & 0x3FF == 0)
    is_anothers = ((alone + beyond) - alone != beyond) | (is_power & (remainder < -16384))
    magnitude = (alone + beyond).clamp(min=0)
    bits = torch.where(~weight.isfinite() | is_anothers, alone, magnitude).view(torch.int32) & 0x7FFFFFFF
    sign = (weight.view(torch.int16).int() & 0x8000) << 16
    return (bits | sign).view(torch.float32)
