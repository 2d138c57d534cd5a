"""Lists the cases of the benchmark: which sides are compared, and where they run."""

from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch

import mpkernels
from mpkernels.bench import linear, ops, steps, training
from mpkernels.bench.pairs import Pair
from mpkernels.bench.settings import FOUR_LARGE, HUNDRED, ONE_50M, THOUSAND, Place, Setting, Sizes, places
from mpkernels.ops import _devices


class Benchmark(NamedTuple):
    """A case: one line of the results."""

    op: str
    setting: Setting
    prepare: Callable[[], Pair]
    kernel_of: str  # the op that does the work
    baseline: str = "torch"
    variant: str = ""  # of our side
    missing: str = ""  # why the case can't be measured here

    @property
    def name(self) -> str:
        return " ".join(filter(None, (self.op, self.variant, str(self.setting), "vs", self.baseline)))

    @property
    def kernel(self) -> str:
        _devices.begin_to_use_cuda()
        return mpkernels.backends(self.kernel_of, self.setting.place.device)[0]


BEST = "torch.amp fused"
DEFAULT = "torch.amp default"
EAGER = "torch.amp eager"
WITHOUT_SCALER = "torch fused"
QUICK = [  # the most telling cases come first, because a slow machine doesn't reach the last ones
    f"step {{place}} bf16 {ONE_50M.name} vs {WITHOUT_SCALER}",  # README's
    f"step {{place}} bf16 {FOUR_LARGE.name} vs {BEST}",
    f"step {{place}} bf16 {FOUR_LARGE.name} vs {DEFAULT}",
    f"step moments-8bit {{place}} bf16 {FOUR_LARGE.name} vs {BEST}",
    f"step {{place}} fp32 {FOUR_LARGE.name} vs {BEST}",
    f"step imports {{one}} fp32 {FOUR_LARGE.name} vs {WITHOUT_SCALER}",
    f"step {{place}} bf16 1000x5k vs {BEST}",
    f"train {{place}} bf16 mlp-6x512-batch-128 vs {BEST}",
    f"linear_act {{place}} bf16 512x768x3072 vs {EAGER}",
    f"train {{place}} bf16 transformer-tiny vs {BEST}",
    "grad_stats {place} fp32 1000x5k vs torch",
    "unscale_ {place} fp32 1000x5k vs torch",
]


def all_cases() -> list[Benchmark]:
    best = places()[-1]  # where whole networks run: on the GPU if there is one, else on all cores
    return [*chain.from_iterable(map(_lists, places())), *_linear(best), *_training(best)]


def select(benchmarks: list[Benchmark], patterns: list[str]) -> list[Benchmark]:
    """Return the cases that patterns name, in the patterns' order. A pattern is part of a name; * matches anything."""
    by_pattern = ([it for it in benchmarks if fnmatch(it.name, f"*{pattern}*")] for pattern in patterns)
    return list({it.name: it for it in chain.from_iterable(by_pattern)}.values())


def quick(benchmarks: list[Benchmark]) -> list[Benchmark]:
    first, best = places()[0], places()[-1]  # one thread; all threads, or the GPU
    order = [name.format(place=best, one=first if best.device == "cpu" else best) for name in QUICK]
    return sorted((it for it in benchmarks if it.name in order), key=lambda it: order.index(it.name))


def step(
    setting: Setting,
    baseline: str = BEST,
    theirs: steps.MakeOptimizer = steps.fused,
    *,
    variant: str = "",
    missing: str = "",
    clock: str = "",
    **options: Any,
) -> Benchmark:
    prepare = partial(steps.compare_steps, setting, theirs, clock or setting.sizes.clock, **options)
    return Benchmark("step", setting, prepare, "adamw_", baseline, variant, missing)


def _lists(place: Place) -> Iterator[Benchmark]:
    """Yield the cases over an optimizer's list of tensors."""
    for sizes in (FOUR_LARGE, HUNDRED, THOUSAND):
        bf16, fp32 = (Setting(place, dtype, sizes) for dtype in ("bf16", "fp32"))
        yield from (step(bf16), step(fp32))
        yield step(bf16, variant="moments-8bit", state_dtype=torch.int8)
        yield from (_without_scaler(bf16), _without_scaler(fp32))
        if place.device == "cpu":
            prepare = partial(steps.compare_imports, fp32, 1.0)
            yield Benchmark("step", fp32, prepare, "adamw_", WITHOUT_SCALER, "imports")
    yield _without_scaler(Setting(place, "bf16", ONE_50M))
    yield step(Setting(place, "bf16", FOUR_LARGE), DEFAULT, steps.default, clock="loop")  # it waits, which no graph can
    fp32 = Setting(place, "fp32", THOUSAND)
    yield Benchmark("grad_stats", fp32, partial(ops.compare_grad_stats, fp32), "grad_stats")
    yield Benchmark("unscale_", fp32, partial(ops.compare_unscale, fp32), "unscale_")


def _without_scaler(setting: Setting) -> Benchmark:
    return Benchmark("step", setting, partial(steps.compare_without_scaler, setting), "adamw_", WITHOUT_SCALER)


def _linear(place: Place) -> Iterator[Benchmark]:
    for rows in (64, 512):
        setting = Setting(place, "bf16", linear.Shape(rows, 768, 3072).sizes())
        yield Benchmark("linear_act", setting, partial(linear.compare, setting), "linear_act", EAGER)


def _training(place: Place) -> Iterator[Benchmark]:
    for name in training.tasks_on(place.device):
        setting = Setting(place, "bf16", Sizes(name))
        for variant in ("", "split-master"):
            ours = training.ours(setting, split_master=bool(variant))
            prepare = partial(training.compare, ours, training.torchs(setting, steps.fused))
            yield Benchmark("train", setting, prepare, "linear_act", BEST, variant)
