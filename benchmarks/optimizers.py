"""Each optimizer's step beside torch's fused class, Lion's beside torch-optimi's; Muons; the cost of reports.

The bytes moved allow these multiples of torch's speed, with fp32 weights: with clipping 1.25 for AdamW and Adam, 1.33
for SGD with momentum, 1.5 without momentum; with clipping and a scaler 1.5, 1.67 and 2; with neither 1 for AdamW and
Adam.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import other_libraries
from mpkernels.bench import steps
from mpkernels.bench.cases import BEST, WITHOUT_SCALER, Benchmark
from mpkernels.bench.pairs import Pair, Workload
from mpkernels.bench.settings import DTYPES, HUNDRED, ONE_50M, THOUSAND, Place, Setting, Sizes
from mpkernels.optim import SGD, Adam, AdamW, Lion, Masters, Muon


class Rule(NamedTuple):
    ours: Callable[..., Any]
    theirs: steps.MakeOptimizer
    op: str
    states: int  # how many a parameter has
    peer: str = ""  # the library that ``theirs`` comes from, if it isn't torch


RULES = {
    "adamw": Rule(AdamW, steps.fused, "adamw_", 2),
    "adam": Rule(Adam, partial(steps.fused, kind=torch.optim.Adam), "adam_", 2),
    "sgd-momentum": Rule(partial(SGD, momentum=0.9), partial(torch.optim.SGD, momentum=0.9, fused=True), "sgd_", 1),
    "sgd": Rule(SGD, partial(torch.optim.SGD, fused=True), "sgd_", 0),
    "lion": Rule(Lion, other_libraries.maker(other_libraries.LION), "lion_", 1, "torch-optimi"),
}


def bytes_of_torchs_step(states: int = 2, unscales: bool = True, clips: bool = True) -> int:
    """Return how many bytes torch moves for each fp32 parameter. unscale_ and clipping read and write the grads, the
    norm reads them. The fused step reads the grads, and reads and writes weight and states."""
    return 8 * unscales + (4 + 8) * clips + 4 + 2 * 4 * (1 + states)


def comparisons(place: Place) -> Iterator[Benchmark]:
    for (name, rule), sizes in product(RULES.items(), (ONE_50M, HUNDRED, THOUSAND)):
        setting = Setting(place, "fp32", sizes)
        alone = partial(steps.compare_without_scaler, setting, rule.ours, rule.theirs, rule.states)
        clock = "loop" if rule.peer else sizes.clock  # a peer's step can't be captured in a graph
        scaled = partial(steps.compare_steps, setting, rule.theirs, clock, rule.states, make=rule.ours)
        baselines, missing = (WITHOUT_SCALER, BEST), ""
        if rule.peer:
            baselines = rule.peer, f"torch.amp {rule.peer}"
            missing = other_libraries.why_not(
                other_libraries.LION.module, other_libraries.LION.needs_cuda, place.device
            )
        for prepare, baseline in zip((alone, scaled), baselines, strict=True):
            yield Benchmark("step", setting, prepare, rule.op, baseline, name, missing)


def masters_around_muon(params: list[Tensor], max_norm: float) -> torch.optim.Optimizer:
    return Masters(torch.optim.Muon(params), max_norm=max_norm)


def compare_muon(setting: Setting, ours: Callable[..., Any], theirs: steps.MakeOptimizer) -> Pair:
    """Compare Muon with masters over weights of any dtype with another over fp32 ones. Both clip; products take most
    time."""
    dtype = DTYPES[setting.dtype]
    return Pair(
        lambda: ours(steps.parameters(setting, dtype), max_norm=steps.MAX_NORM).step,
        lambda: steps.clip_and_step(steps.parameters(setting, torch.float32), theirs, torch.nn.utils.clip_grad_norm_),
        clock="loop",
    )


def muons(place: Place, sizes: Sizes) -> Iterator[Benchmark]:
    """Muon beside torch's and pytorch_optimizer's, and ``Masters`` of torch's."""
    peer = other_libraries.MUON
    missing = other_libraries.why_not(peer.module, peer.needs_cuda, place.device)
    for dtype in ("fp32", "bf16", "fp16"):
        setting = Setting(place, dtype, sizes)
        beside = partial(compare_muon, setting)
        yield Benchmark("step", setting, partial(beside, Muon, torch.optim.Muon), "sgd_", "torch Muon", "muon")
        peers = partial(
            beside, Muon, lambda params: other_libraries.maker(peer)([{"params": params, "use_muon": True}])
        )
        yield Benchmark("step", setting, peers, "sgd_", peer.module, "muon", missing)
        if dtype != "fp32":
            wrapped = partial(beside, masters_around_muon, torch.optim.Muon)
            yield Benchmark("step", setting, wrapped, "grad_stats", "torch Muon", "masters-muon")


def compare_reporting(setting: Setting) -> Pair:
    """Compare steps with and without a report. A report adds no bytes or launches, so 1 is expected."""
    dtype = DTYPES[setting.dtype]
    moved = int(steps.bytes_of_our_step(dtype) * setting.sizes.elements)

    def silent() -> Workload:
        optimizer = AdamW(steps.parameters(setting, dtype), guard=True)
        optimizer.step()
        for plan in optimizer._plans:
            plan.report = None
        return optimizer.step

    reporting = AdamW(steps.parameters(setting, dtype), guard=True)
    return Pair(lambda: reporting.step, silent, moved=moved, clock=setting.sizes.clock)
