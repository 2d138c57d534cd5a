"""Times what follows the backward in a training loop: mpkernels.amp and mpkernels.optim beside torch.amp.

torch's side calls unscale_, clip_grad_norm_, step and update; ours calls step, which clips, and update. Without a
scaler, torch's side is clip_grad_norm_ and step, and ours is step alone or the same two calls.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from mpkernels import amp
from mpkernels.bench.pairs import Pair, Workload
from mpkernels.bench.settings import DTYPES, Setting
from mpkernels.optim import AdamW

MAX_NORM = 1.0

MakeOptimizer = Callable[[Iterable[Parameter]], torch.optim.Optimizer]


class AfterForward(NamedTuple):
    scale: Callable[[Tensor], Tensor]  # scales the loss
    finish: Workload  # runs all that follows the backward


def scaler_of(kind: type[torch.amp.GradScaler], device: str) -> torch.amp.GradScaler:
    """Return a scaler whose scale stays 1, because each run uses the same grads, and torch's unscale_ rewrites them."""
    scaler = kind(device, init_scale=1.0, growth_interval=10**9)
    scaler.scale(torch.ones((), device=device))  # makes the scale
    return scaler


def our_step(
    params: list[Parameter], device: str, clips: bool = True, make: Callable[..., Any] = AdamW, **options: Any
) -> AfterForward:
    optimizer = make(params, max_norm=MAX_NORM if clips else None, **options)
    scaler = scaler_of(amp.GradScaler, device)

    def finish() -> None:
        scaler.step(optimizer)
        scaler.update()

    return AfterForward(scaler.scale, finish)


def torchs_step(params: list[Parameter], device: str, make: MakeOptimizer, clips: bool = True) -> AfterForward:
    kind = torch.amp.GradScaler if params[0].itemsize > 2 else amp.GradScaler  # torch's refuses 16-bit grads on CUDA
    optimizer, scaler = make(params), scaler_of(kind, device)

    def finish() -> None:
        if clips:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(params, MAX_NORM)
        scaler.step(optimizer)
        scaler.update()

    return AfterForward(scaler.scale, finish)


def fused(
    params: Iterable[Parameter], kind: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
) -> torch.optim.Optimizer:
    return kind(params, fused=True, capturable=torch.cuda.is_available())  # CUDA graphs need capturable


def default(params: Iterable[Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params)


def parameters(setting: Setting, dtype: torch.dtype) -> list[Parameter]:
    params = [Parameter(value) for value in setting.tensors(dtype)]
    for param in params:
        param.grad = param.detach().flip(0)  # random numbers that are quickly made
    return params


def bytes_of_our_step(
    dtype: torch.dtype, state_dtype: torch.dtype = torch.float32, states: int = 2, master: str = "split"
) -> float:
    """Return how many bytes a step moves for each parameter of a dtype, with a grad of that dtype. It reads the grads
    twice, for their norm and for the update; it reads and writes the true weight (4 bytes, of which a split master's
    weight is a part), a weight beside an fp32 master, and the states. 256 states in 8 bits share an fp32 scale."""
    of_states = states * (state_dtype.itemsize + (4 / 256 if state_dtype == torch.int8 else 0))
    beside_master = dtype.itemsize if master == "fp32" and dtype != torch.float32 else 0
    return 2 * dtype.itemsize + 2 * (4 + beside_master + of_states)


def compare_steps(
    setting: Setting,
    theirs: MakeOptimizer,
    clock: str,
    states: int = 2,
    weights: torch.dtype = torch.float32,
    **options: Any,
) -> Pair:
    """Compare steps under a scaler. Our parameters have the setting's dtype, with split masters in 16 bits; the others
    have ``weights``."""
    dtype, device = DTYPES[setting.dtype], setting.place.device
    chosen = {name: options[name] for name in ("state_dtype", "master") if name in options}
    moved = bytes_of_our_step(dtype, states=states, **chosen) * setting.sizes.elements
    return Pair(
        lambda: our_step(parameters(setting, dtype), device, **options).finish,
        lambda: torchs_step(parameters(setting, weights), device, theirs, options.get("clips", True)).finish,
        moved=int(moved),
        clock=clock,
        is_counted=True,
    )


def compare_without_scaler(
    setting: Setting, ours: Callable[..., Any] = AdamW, theirs: MakeOptimizer = fused, states: int = 2
) -> Pair:
    """Compare ``AdamW(max_norm=...)`` with torch's clip_grad_norm_ and fused step. A parameter has ``states``."""
    dtype = DTYPES[setting.dtype]
    return Pair(
        lambda: ours(parameters(setting, dtype), max_norm=MAX_NORM).step,
        lambda: clip_and_step(parameters(setting, torch.float32), theirs, torch.nn.utils.clip_grad_norm_),
        moved=int(bytes_of_our_step(dtype, states=states) * setting.sizes.elements),
        clock="loop",
    )


def compare_imports(setting: Setting, share: float) -> Pair:
    """Compare the same calls with different imports. Each run clips the grads to ``share`` of their norm. If ``share``
    is 1, torch rewrites all grads nevertheless, and we don't."""
    dtype = DTYPES[setting.dtype]
    rewritten = 2 * dtype.itemsize * (share < 1)
    return Pair(
        lambda: clip_and_step(parameters(setting, dtype), AdamW, amp.clip_grad_norm_, share),
        lambda: clip_and_step(parameters(setting, torch.float32), fused, torch.nn.utils.clip_grad_norm_, share),
        moved=int((bytes_of_our_step(dtype) + rewritten) * setting.sizes.elements),
    )


def clip_and_step(
    params: list[Parameter], make: MakeOptimizer, clip: Callable[..., Tensor], share: float = 0.0
) -> Workload:
    """Return a run of clipping and step. ``share`` is that of ``compare_imports``, which reads the norm and so is for
    CPUs alone; 0 clips to MAX_NORM."""
    optimizer, most = make(params), math.inf if share else MAX_NORM

    def finish() -> None:
        nonlocal most
        norm = clip(params, most)
        most = share * min(float(norm), most) if share else most
        optimizer.step()

    return finish
