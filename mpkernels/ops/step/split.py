"""A 16-bit weight's fp32 master in two halves, in torch, as the specification. csrc/step/split.h explains it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mpkernels._torch_private.ops import foreach_copy_

# So many elements of small weights are computed together: the host launches fewer ops, which need memory for longer
# lists. Muon on an H200 took 0.91 (bf16) and 0.81 (fp16) of the time with 2^22: results/gpu/checks-h200-2026-11-27.txt.
# On a CPU, 64 KiB of masters, which stay in its caches.
TOGETHER = {"cuda": 2**24, "cpu": 2**14}


def split(master: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the 16-bit weight and the int16 remainder of an fp32 master."""
    return _split_bf16(master) if dtype == torch.bfloat16 else _split_fp16(master)


def join(weight: Tensor, remainder: Tensor) -> Tensor:
    """Return the fp32 master of a 16-bit weight and its remainder."""
    return (_join_bf16 if weight.dtype == torch.bfloat16 else _join_fp16)(weight, remainder)


def join_each(weights: Sequence[Tensor], remainders: Sequence[Tensor]) -> list[Tensor]:
    """Return the master of each, as ``join`` does."""
    masters = []
    for batch in _batches(weights):
        some = [weights[i] for i in batch]
        parts = _parts(join(_flat(some), _flat([remainders[i] for i in batch])), some)
        if len(batch) > 1:  # each gets memory of its own, aligned and laid out as its weight is
            copies = [torch.empty_like(it, dtype=torch.float32) for it in some]
            foreach_copy_(copies, parts)
            parts = copies
        masters += parts
    return masters


def split_each(masters: Sequence[Tensor], weights: Sequence[Tensor], remainders: Sequence[Tensor]) -> None:
    """Write the two halves of each master, as ``split`` returns them, to its weight and its remainder."""
    for batch in _batches(weights):
        halves = split(_flat([masters[i] for i in batch]), weights[batch[0]].dtype)
        for half, tensors in zip(halves, (weights, remainders), strict=True):
            some = [tensors[i] for i in batch]
            foreach_copy_(some, _parts(half, some))


def _batches(weights: Sequence[Tensor]) -> list[list[int]]:
    """Divide the places of weights into batches, so that small weights are computed together."""
    batches: list[list[int]] = []
    room = 0
    for i, it in enumerate(weights):
        if batches and it.numel() <= room and (it.device, it.dtype) == (weights[i - 1].device, weights[i - 1].dtype):
            batches[-1].append(i)
        else:
            batches.append([i])
            room = TOGETHER.get(it.device.type, 0)
        room -= it.numel()
    return batches


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    """Return the elements of all tensors as one; a single tensor as it is."""
    return tensors[0] if len(tensors) == 1 else torch.cat([tensor.reshape(-1) for tensor in tensors])


def _parts(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Undo ``_flat``."""
    if len(like) == 1:
        return [flat]
    parts = flat.split([it.numel() for it in like])
    return [part.view(it.shape) for part, it in zip(parts, like, strict=True)]


def copied_master(weight: Tensor, copy: Tensor) -> Tensor:
    """Return the fp32 master of a 16-bit weight: the copy where it rounds to the weight, else the weight."""
    is_current = copy.to(weight.dtype).view(torch.int16) == weight.view(torch.int16)
    return torch.where(is_current, copy, weight.float())


def _split_bf16(master: Tensor) -> tuple[Tensor, Tensor]:
    bits = master.view(torch.int32)
    kept = torch.where(master.isnan(), bits & -0x10000 | 0x400000, bits)  # a NaN would round to inf
    return (kept + 0x8000 >> 16).to(torch.int16).view(torch.bfloat16), kept.to(torch.int16)


def _join_bf16(weight: Tensor, remainder: Tensor) -> Tensor:
    alone = weight.float()
    joined = (alone.view(torch.int32) + remainder).view(torch.float32)
    return torch.where(joined.isnan(), alone, joined)  # beyond 0 or inf, joined is a NaN


def _unit_of_fp16(magnitude: Tensor) -> Tensor:
    """Return a 2^-16th of the last place of an fp16, whose magnitude is given in fp32."""
    exponent = magnitude.view(torch.int32) & 0x7F800000
    return (exponent.clamp(min=113 << 23) - (26 << 23)).view(torch.float32)


def _split_fp16(master: Tensor) -> tuple[Tensor, Tensor]:
    magnitude = master.abs()
    nearest = magnitude.half()
    wide = nearest.float()
    is_tie = (magnitude - wide) / _unit_of_fp16(wide) >= 32768
    weight = (nearest.view(torch.int16) + is_tie).view(torch.float16)
    wide = weight.float()
    remainder = ((magnitude - wide) / _unit_of_fp16(wide)).round().clamp(max=32767)
    remainder = torch.where(weight.isfinite(), remainder, 0).to(torch.int16)
    sign = master.view(torch.int32) >> 16 & 0x8000
    return (weight.view(torch.int16) | sign.to(torch.int16)).view(torch.float16), remainder


def _join_fp16(weight: Tensor, remainder: Tensor) -> Tensor:
    alone = weight.abs().float()
    beyond = remainder * _unit_of_fp16(alone)
    is_power = (alone > 2**-14) & (weight.view(torch.int16) & 0x3FF == 0)
    joined = alone + beyond
    is_anothers = (joined - alone != beyond) | (is_power & (remainder < -16384))
    bits = torch.where(~weight.isfinite() | is_anothers, alone, joined.clamp(min=0)).view(torch.int32) & 0x7FFFFFFF
    sign = (weight.view(torch.int16).int() & 0x8000) << 16
    return (bits | sign).view(torch.float32)
