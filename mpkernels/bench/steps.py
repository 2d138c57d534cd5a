"""What follows backward in a training loop, from scaler to step: mpkernels.amp and mpkernels.optim beside torch.amp.

Whole sequences on both sides: torch's is unscale_, clip_grad_norm_, step, update; ours is step and update, for the
clipping happens in the step. Without a scaler: clip_grad_norm_ and step beside our step, or beside the same two calls.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from mpkernels import amp
from mpkernels.bench.pairs import Pair, Run
from mpkernels.bench.settings import DTYPES, Setting
from mpkernels.optim import AdamW, Masters

MAX_NORM = 1.0

MakeOptimizer = Callable[[Iterable[Parameter]], torch.optim.Optimizer]


class AfterForward(NamedTuple):
    scale: Callable[[Tensor], Tensor]  # the loss
    finish: Run  # once grads are there


def scaler_of(kind: type[torch.amp.GradScaler], device: str) -> torch.amp.GradScaler:
    """At a scale of 1, and it stays there: grads are used again and again, though torch's unscale_ rewrites them."""
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
    optimizer, scaler = make(params), scaler_of(torch.amp.GradScaler, device)

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
    return kind(params, fused=True, capturable=torch.cuda.is_available())  # the latter for CUDA graphs


def default(params: Iterable[Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params)


def parameters(setting: Setting, dtype: torch.dtype) -> list[Parameter]:
    params = [Parameter(value) for value in setting.tensors(dtype)]
    for param in params:
        param.grad = param.detach().flip(0)  # random, too, and made in no time
    return params


def bytes_of_our_step(grads_dtype: torch.dtype, state_dtype: torch.dtype = torch.float32, states: int = 2) -> float:
    """For each parameter. The grads are read twice, for their norm and for the step; the weight (with its remainder, 4
    bytes either way) and the states are read and written once, and so is an fp32 scale of 256 states in 8 bits."""
    of_states = states * (state_dtype.itemsize + (4 / 256 if state_dtype == torch.int8 else 0))
    return 2 * grads_dtype.itemsize + 2 * (4 + of_states)


def bytes_of_torchs_step(states: int = 2, unscales: bool = True) -> int:
    """For each parameter, all fp32: unscale_ and clipping read and write the grads, the norm reads them; the fused step
    reads them and reads and writes weight and states."""
    return 8 * unscales + 4 + 8 + 4 + 2 * 4 * (1 + states)


def compare_steps(setting: Setting, theirs: MakeOptimizer, clock: str, states: int = 2, **options: Any) -> Pair:
    """Our parameters have the grads' dtype, and a split master if that is 16 bits wide; torch's are fp32."""
    dtype, device = DTYPES[setting.dtype], setting.place.device
    elements = sum(map(_elements, setting.case.shapes))
    moved = bytes_of_our_step(dtype, options.get("state_dtype", torch.float32), states) * elements
    return Pair(
        lambda: our_step(parameters(setting, dtype), device, **options).finish,
        lambda: torchs_step(parameters(setting, torch.float32), device, theirs, options.get("clips", True)).finish,
        moved=int(moved),
        clock=clock,
        is_counted=True,
    )


def compare_without_scaler(
    setting: Setting, ours: Callable[..., Any] = AdamW, theirs: MakeOptimizer = fused, states: int = 2
) -> Pair:
    """``AdamW(max_norm=...)``, and torch's clip_grad_norm_ before its fused step. states: how many a parameter has."""
    dtype = DTYPES[setting.dtype]
    return Pair(
        lambda: ours(parameters(setting, dtype), max_norm=MAX_NORM).step,
        lambda: _clip_and_step(parameters(setting, torch.float32), theirs, torch.nn.utils.clip_grad_norm_),
        moved=int(bytes_of_our_step(dtype, states=states) * sum(map(_elements, setting.case.shapes))),
        clock="loop",
    )


def compare_imports(setting: Setting, share: float) -> Pair:
    """The same calls, of which only the imports differ. share: of their norm that the grads are clipped to in each run.
    1 clips none, and then torch rewrites all of them, and we don't."""
    dtype = DTYPES[setting.dtype]
    rewritten = 2 * dtype.itemsize * (share < 1)
    return Pair(
        lambda: _clip_and_step(parameters(setting, dtype), AdamW, amp.clip_grad_norm_, share),
        lambda: _clip_and_step(parameters(setting, torch.float32), fused, torch.nn.utils.clip_grad_norm_, share),
        moved=int((bytes_of_our_step(dtype) + rewritten) * sum(map(_elements, setting.case.shapes))),
    )


def _clip_and_step(
    params: list[Parameter], make: MakeOptimizer, clip: Callable[..., Tensor], share: float = 0.0
) -> Run:
    """share: as ``compare_imports`` has it, for a CPU, whose host needn't wait for a norm; 0: clip to MAX_NORM."""
    optimizer, most = make(params), math.inf if share else MAX_NORM

    def finish() -> None:
        nonlocal most
        norm = clip(params, most)
        most = share * min(float(norm), most) if share else most
        optimizer.step()

    return finish


def compare_muon(setting: Setting) -> Pair:
    """``Masters`` around torch's Muon over 16-bit weights, and Muon over fp32 ones; both clip. Products decide."""
    dtype = DTYPES[setting.dtype]
    return Pair(
        lambda: Masters(torch.optim.Muon(parameters(setting, dtype)), max_norm=MAX_NORM).step,
        lambda: _clip_and_step(parameters(setting, torch.float32), torch.optim.Muon, torch.nn.utils.clip_grad_norm_),
        clock="loop",
    )


def compare_reporting(setting: Setting) -> Pair:
    """A step that could report an overflow beside the same without: no more bytes or launches, so 1 is expected."""
    dtype = DTYPES[setting.dtype]
    moved = int(bytes_of_our_step(dtype) * sum(map(_elements, setting.case.shapes)))

    def silent() -> Run:
        optimizer = AdamW(parameters(setting, dtype), guard=True)
        optimizer.step()
        for plan in optimizer._plans:
            plan.report = None
        return optimizer.step

    reporting = AdamW(parameters(setting, dtype), guard=True)
    return Pair(lambda: reporting.step, silent, moved=moved, clock=setting.case.clock)


def _elements(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())
