"""Clipping by the norm of all grads."""

import math
import types
import warnings
from collections.abc import Iterable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from mpkernels._shared.parameters import by_device, put_on, real_memory, sum_of
from mpkernels._torch_private.ops import foreach_mul_
from mpkernels._torch_private.tracing import is_known_to_host
from mpkernels.distributed import fsdp1
from mpkernels.distributed.parts import parts_of, settled_grads
from mpkernels.distributed.processes import Processes, given
from mpkernels.distributed.shares import peers_of
from mpkernels.ops import unscale_
from mpkernels.optim.norm_without_plan import stats_by_device


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    process_group: Any = None,
) -> Tensor:
    """Scale all grads in place so that their common norm is at most ``max_norm``, and return the norm before that.

    It replaces ``torch.nn.utils.clip_grad_norm_``, and differs in two ways:

    * The norm of 16-bit grads is summed in fp32 and fp64, and returned in fp32. torch's norm of fp16 grads becomes inf
      above 65504, and then every grad becomes 0.
    * If the norm is inf or NaN, the grads stay unchanged. torch makes all of them NaN or 0, and nobody can tell any
      more which grad has overflowed.

    One kernel launch reads the grads (norm_type 2), another one scales them; on a CPU, only if the norm is above
    ``max_norm``. The host waits for the device only with ``error_if_nonfinite``. ``AdamW(max_norm=...)`` clips inside
    its step instead, without writing to a grad.

    Args:
        parameters: a tensor or several, whose grads are clipped.
        max_norm: the largest norm that the grads may have together.
        norm_type: which norm; ``inf`` is allowed.
        error_if_nonfinite: whether to raise if the norm is inf or NaN.
        foreach: has no effect; all grads are scaled together.
        process_group: the processes that each hold one part of the grads, as under FSDP1. All clip by their common
            norm. Every process has to call this function, even without grads.

    Returns:
        The norm before clipping, in fp32, or in fp64 if a grad is fp64.
    """
    if isinstance(parameters, Tensor):
        parameters = [parameters]
    is_generator = isinstance(parameters, types.GeneratorType)
    params = list(parameters)
    if is_generator and not params:
        warnings.warn("`parameters` is an empty generator, no gradient clipping will occur.", stacklevel=3)
    with_grads = [param for param in params if param.grad is not None]
    grads = parts_of(settled_grads(with_grads))
    max_norm, norm_type = float(max_norm), float(norm_type)
    peers = given("clip_grad_norm_", process_group)
    parts = peers_of(params, None if peers is None else peers.group)
    processes = parts or peers or fsdp1.peers_of("clip_grad_norm_", params, for_norm=True)
    if not grads and processes is None:
        return torch.tensor(0.0)
    if parts is not None and not norm_type > 0:
        raise ValueError(f"clip_grad_norm_: norm_type must be above 0 for DTensors, got {norm_type}")
    numbers = _real(grads)
    shares = None if parts is None else parts.shares(with_grads)
    norm = _norm(numbers if norm_type == 2 else grads, norm_type, params, processes, shares)
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from "
            "`parameters` is non-finite, so it cannot be clipped. To disable "
            "this error and leave the gradients as they are, "
            "set `error_if_nonfinite=False`"
        )
    coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    coefficient.masked_fill_(norm.isfinite().logical_not(), 1.0)
    if not _is_known_one(coefficient):
        _scale(numbers, coefficient)
    return norm


def _norm(
    grads: Sequence[Tensor],
    norm_type: float,
    params: Sequence[Tensor],
    processes: Processes | None,
    shares: Sequence[float] | None,
) -> Tensor:
    """Return the norm, on the device of the first grad. With processes, return their common norm, on the device where
    they communicate. ``shares`` says how much each grad's square counts in the sum over processes, because several may
    hold the same grad."""
    dtype = reduce(torch.promote_types, {grad.dtype for grad in grads}, torch.float32)
    dtype = dtype.to_real() if dtype.is_complex else dtype  # torch.compile can't trace to_real
    try:
        partial_norm = _own_norm(grads, norm_type, shares)
    except Exception:  # tell the other processes: they don't clip, and on a CPU they raise, too
        if processes is not None and norm_type == 2:
            processes.agree(params, None, None, has_failed=True)
        elif processes is not None:
            processes.norm(params, math.nan, norm_type)
        raise
    if norm_type != 2:
        return (partial_norm if processes is None else processes.norm(params, partial_norm, norm_type)).to(dtype)
    sumsq = partial_norm
    if processes is not None:
        sumsq, _, failed, _ = processes.agree(params, sumsq, None)
        processes.refuse_if_failed("clip_grad_norm_", failed)
        sumsq = sumsq.masked_fill(failed > 0, math.nan)
    return sumsq.sqrt().to(dtype)


def _own_norm(grads: Sequence[Tensor], norm_type: float, shares: Sequence[float] | None) -> Tensor:
    """Return the norm of this process's grads; for type 2 the norm's square."""
    device = grads[0].device if grads else torch.device("cpu")
    nothing = torch.zeros((), dtype=torch.float64, device=device)
    if norm_type == 2:
        return sum_of([sumsq for sumsq, _ in stats_by_device(grads, shares)] or [nothing])
    found: list[Tensor] = []
    for i, grad in enumerate(grads):
        if grad.numel() > 0:
            wide = torch.complex128 if grad.is_complex() else torch.float64
            norm = torch.linalg.vector_norm(grad, norm_type, dtype=wide)
            found.append(put_on(device, norm if shares is None else norm * shares[i] ** (1 / norm_type)))
    return torch.linalg.vector_norm(torch.stack(found or [nothing]), norm_type)  # type: ignore[no-any-return]


def _is_known_one(coefficient: Tensor) -> bool:
    """Return whether the host knows that the coefficient is 1, so that no grad changes."""
    return is_known_to_host(coefficient) and float(coefficient) == 1.0


def _scale(grads: Sequence[Tensor], coefficient: Tensor) -> None:
    for neighbours in by_device(grads, grads).values():
        factor = put_on(neighbours[0].device, coefficient)
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for grad in neighbours:
            # On a CPU torch's product takes 0.85 of the time of unscale_, which also looks for inf.
            is_torchs = grad.dtype == torch.float64 or (grad.dtype == torch.float32 and grad.device.type == "cpu")
            by_dtype.setdefault(grad.dtype if is_torchs else torch.float16, []).append(grad)
        for dtype, same in by_dtype.items():
            try:
                _multiply(same, dtype, factor)
            except RuntimeError:
                if not any(map(Tensor.is_neg, same)):  # torch changes no list of negated views
                    raise
                _multiply(list(map(real_memory, same)), dtype, factor)
                increment_version(same)


def _multiply(grads: list[Tensor], dtype: torch.dtype, factor: Tensor) -> None:
    if dtype != torch.float16:
        foreach_mul_(grads, factor.to(dtype))
    else:  # multiplied in fp32 and rounded once; torch would round the coefficient to 16 bits first
        unscale_(grads, torch.zeros((), dtype=torch.float32, device=factor.device), factor.float())


def _real(grads: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return complex grads as real views of their memory."""
    return list(map(real_memory, grads)) if any(map(torch.is_complex, grads)) else grads
