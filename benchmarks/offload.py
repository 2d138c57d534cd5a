"""A step on the host beside torchao's CPUOffloadOptimizer, and beside torch's fused AdamW over copies made by hand.

On a GPU all is timed: grads are copied during the backward, the host steps, weights are copied back. On a CPU only the
host's step is timed, beside one fused AdamW for each parameter, which is what torchao calls, and beside one for all.
The baselines have fp32 weights. Ours and the one for all clip; torchao can't. In "no-clipping" cases nobody clips. In
"stream" cases the GPU steps, and states travel; its time beside ours without offload is what that costs.
"""

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from benchmarks import other_libraries
from mpkernels.bench import steps
from mpkernels.bench.cases import Benchmark
from mpkernels.bench.pairs import Pair, Workload
from mpkernels.bench.settings import DTYPES, HUNDRED, Place, Setting
from mpkernels.optim import AdamW

Theirs = Callable[[list[Parameter], bool], Workload]  # takes parameters that have grads, and whether to clip


def comparisons(place: Place) -> Iterator[Benchmark]:
    theirs: dict[str, Theirs] = {"torchao offload": _torchaos, "torch fused alone": _torchs}
    ways: list[bool | str] = [True]
    if place.device == "cuda":
        theirs["ours, resident"] = partial(_ours, False)
        ways.append("stream")
    kept: dict[tuple[str, str], dict[str, Any]] = {
        ("fp32", ""): {},
        ("bf16", ""): {},
        ("bf16", "moments-8bit"): {"state_dtype": torch.int8},
    }
    for way, ((dtype, variant), options), (baseline, make), clips in product(
        ways, kept.items(), theirs.items(), (True, False)
    ):
        setting = Setting(place, dtype, HUNDRED)
        missing = other_libraries.why_not("torchao.optim", False, place.device) if make is _torchaos else ""
        prepare = partial(compare, setting, way, make, clips, **options)
        variant = "-".join(filter(None, (variant, "" if way is True else way, "" if clips else "no-clipping")))
        yield Benchmark("offload", setting, prepare, "adamw_", baseline, variant, missing)


def compare(setting: Setting, way: bool | str, theirs: Theirs, clips: bool, **options: Any) -> Pair:
    dtype = DTYPES[setting.dtype]
    moved = steps.bytes_of_our_step(dtype, options.get("state_dtype", torch.float32))
    if not clips:
        moved -= dtype.itemsize  # the grads are read once
    return Pair(
        lambda: _ours(way, steps.parameters(setting, dtype), clips, **options),
        lambda: theirs(steps.parameters(setting, torch.float32), clips),
        moved=int(moved * setting.sizes.elements),
        clock="loop",
    )


def _ours(way: bool | str, params: list[Parameter], clips: bool, **options: Any) -> Workload:
    checks = {"max_norm": steps.MAX_NORM} if clips else {"guard": False}
    optimizer = AdamW(params, offload=way, **checks, **options)
    if not params[0].is_cuda:
        return optimizer.step
    if way is True:
        optimizer.release_grads()
    return _after_backward(params, optimizer.step)


def _torchaos(params: list[Parameter], clips: bool) -> Workload:
    if not params[0].is_cuda:
        inner = [torch.optim.AdamW([param], fused=True) for param in params]
        return lambda: [optimizer.step() for optimizer in inner]
    kind = importlib.import_module("torchao.optim").CPUOffloadOptimizer
    return _after_backward(params, kind(params, offload_gradients=True).step)


def _torchs(params: list[Parameter], clips: bool) -> Workload:
    copies = [Parameter(param.detach().cpu()) for param in params] if params[0].is_cuda else params
    optimizer = torch.optim.AdamW(copies, fused=True)

    def step() -> None:
        if clips:
            torch.nn.utils.clip_grad_norm_(copies, steps.MAX_NORM)
        optimizer.step()

    @torch.no_grad()
    def whole() -> None:
        for param, copy in zip(params, copies, strict=True):
            copy.grad, param.grad = _on_host(param.grad), None
        step()
        for param, copy in zip(params, copies, strict=True):
            param.copy_(copy)

    return _after_backward(params, whole) if params[0].is_cuda else step


def _on_host(grad: Tensor | None) -> Tensor | None:
    return None if grad is None else grad.cpu()


def _after_backward(params: list[Parameter], step: Callable[[], object]) -> Workload:
    """Return a run of a backward that only accumulates these grads, and of the step."""
    grads = []
    for param in params:
        grads.append(param.grad)
        param.grad = None

    def run() -> None:
        torch.autograd.backward(params, grads)
        step()

    return run
