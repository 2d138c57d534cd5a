"""AdamW's step without a scaler, with clipping and alone, beside torch's fused AdamW and other libraries'.

Our moments have the rival's dtype, and our weights are bf16 if the rival's are. By default, our step of bf16 weights
looks for inf and NaN, with clipping and alone.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch.nn import Parameter

from benchmarks import other_libraries
from mpkernels._shared.parameters import params_of
from mpkernels.bench import steps
from mpkernels.bench.cases import WITHOUT_SCALER, Benchmark
from mpkernels.bench.pairs import Pair, Workload
from mpkernels.bench.settings import DTYPES, HUNDRED, ONE_50M, THOUSAND, Place, Setting, Sizes
from mpkernels.optim import AdamW

BLOCK = 256  # torchao keeps moments in 8 bits only if their number is a multiple of this


def in_blocks(sizes: Sizes) -> Sizes:
    """Return the sizes, each rounded to a multiple of BLOCK."""
    return sizes._replace(shapes=tuple((round(length / BLOCK) * BLOCK,) for (length,) in sizes.shapes))


SIZES = [in_blocks(it) for it in (ONE_50M, HUNDRED, THOUSAND)]
CLIPS = {"clip-and-step": True, "step-alone": False}
VARIANTS = {torch.float32: "", torch.bfloat16: "moments-bf16", torch.int8: "moments-8bit"}


class Rival(NamedTuple):
    """An optimizer that ours is compared with, and the dtypes of both."""

    name: str
    make: steps.MakeOptimizer
    dtype: str  # of our weights
    moments: torch.dtype
    weights: torch.dtype = torch.float32  # the rival's
    missing: str = ""


def rivals(place: Place) -> Iterator[Rival]:
    for dtype, moments in (("fp32", torch.float32), ("bf16", torch.float32), ("bf16", torch.int8)):
        yield Rival(WITHOUT_SCALER, steps.fused, dtype, moments)
    missing = other_libraries.why_no_bf16_moments(place.device)
    yield Rival("torch fused, bf16 moments", _with_bf16_moments, "fp32", torch.bfloat16, missing=missing)
    for name, peer in other_libraries.PEERS.items():
        dtype = next(word for word, it in DTYPES.items() if it == peer.weights)
        missing = other_libraries.why_not(peer.module, peer.needs_cuda, place.device)
        yield Rival(name, other_libraries.maker(peer), dtype, peer.moments, peer.weights, missing)


def _with_bf16_moments(params: Iterable[Parameter]) -> torch.optim.Optimizer:
    """Return torch's fused AdamW over fp32 weights whose moments are bf16, because they are put there, as torchtitan
    does."""
    optimizer = steps.fused(params)
    for param in params_of(optimizer):
        moments = {key: torch.zeros_like(param, dtype=torch.bfloat16) for key in ("exp_avg", "exp_avg_sq")}
        optimizer.state[param] = {"step": torch.zeros((), device=param.device), **moments}
    return optimizer


def comparisons(place: Place) -> Iterator[Benchmark]:
    for sizes, (op, clips), rival in product(SIZES, CLIPS.items(), rivals(place)):
        setting = Setting(place, rival.dtype, sizes)
        prepare = partial(compare, setting, rival, clips)
        yield Benchmark(op, setting, prepare, "adamw_", rival.name, VARIANTS[rival.moments], rival.missing)


def compare(setting: Setting, rival: Rival, clips: bool) -> Pair:
    dtype = DTYPES[setting.dtype]
    options: dict[str, Any] = {"max_norm": steps.MAX_NORM if clips else None, "state_dtype": rival.moments}
    moved = steps.bytes_of_our_step(dtype, rival.moments)
    if not clips and dtype == torch.float32:
        moved -= dtype.itemsize  # nothing reads the grads before the step
    return Pair(
        lambda: AdamW(steps.parameters(setting, dtype), **options).step,
        lambda: _step_of(rival, setting, clips),
        moved=int(moved * setting.sizes.elements),
        clock="loop",  # a peer's step can't be captured in a graph
        is_counted=clips,  # only one of the two cases has to be counted
    )


def _step_of(rival: Rival, setting: Setting, clips: bool) -> Workload:
    params = steps.parameters(setting, rival.weights)
    if clips:
        return steps.clip_and_step(params, rival.make, torch.nn.utils.clip_grad_norm_)
    return rival.make(params).step
