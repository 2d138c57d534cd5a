"""What is compared with what, and where."""

from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from functools import partial
from itertools import chain, product
from typing import Any, NamedTuple

import torch

import mpkernels
from mpkernels.bench import blocks, linear, ops, peers, rules, sharded, steps, training
from mpkernels.bench.pairs import Pair
from mpkernels.bench.settings import LISTS_ANYWHERE, Case, Place, Setting, lists, places
from mpkernels.ops import _devices


class Benchmark(NamedTuple):
    """A line of the results."""

    op: str
    setting: Setting
    prepare: Callable[[], Pair]
    kernel_of: str  # the op that does the work
    baseline: str = "torch"
    variant: str = ""  # of ours
    missing: str = ""  # why it can't be measured here

    @property
    def name(self) -> str:
        return " ".join(filter(None, (self.op, self.variant, str(self.setting), "vs", self.baseline)))

    @property
    def kernel(self) -> str:
        _devices.look_now()
        return mpkernels.backends(self.kernel_of, self.setting.place.device)[0]


BEST = "torch.amp fused"
DEFAULT = "torch.amp default"
EAGER = "torch.amp eager"
WITHOUT_SCALER = "torch fused"
TUNED = "torch.compile max-autotune"
LIGER = "liger-kernel"
LARGE = "100x500k", "1000x5k"
QUICK_LIST = Case("4x2.5M", ((2_500_000,),) * 4)  # out of most caches; where threads wait for cores, few ops wait
MATRICES = {  # for Muon, whose bf16 products are slow on many a CPU
    "cpu": Case("4x96x96", ((96, 96),) * 4),
    "cuda": Case("16x1024x1024", ((1024, 1024),) * 16),
}
STEPS = [Case("20x350k", ((350_000,),) * 20), QUICK_LIST, *(it for it in LISTS_ANYWHERE if it.name in LARGE)]
QUICK = [  # what says the most first, for a slow machine does not come to the end
    f"step {{place}} bf16 {QUICK_LIST.name} vs {BEST}",
    f"step {{place}} bf16 {QUICK_LIST.name} vs {DEFAULT}",
    f"step moments-8bit {{place}} bf16 {QUICK_LIST.name} vs {BEST}",
    f"step {{place}} fp32 {QUICK_LIST.name} vs {BEST}",
    f"step {{one}} bf16 {QUICK_LIST.name} vs {WITHOUT_SCALER}",
    f"step imports {{one}} fp32 {QUICK_LIST.name} vs {WITHOUT_SCALER}",
    f"step {{place}} bf16 1000x5k vs {BEST}",
    f"train {{place}} bf16 mlp-6x512-batch-128 vs {BEST}",
    f"linear_act {{place}} bf16 512x768x3072 vs {EAGER}",
    f"train {{place}} bf16 transformer-tiny vs {BEST}",
    "grad_stats {place} fp32 1000x5k vs torch",
    "unscale_ {place} fp32 1000x5k vs torch",
]


def all_cases() -> list[Benchmark]:
    on_each = (chain(_single_ops(place), _steps(place)) for place in places())
    best = places()[-1]  # whole networks: with all cores, and on the GPU where there is one
    rest = _quick_steps(best), _linear(best), _blocks(best), _training(best)
    return [*chain.from_iterable(on_each), *chain.from_iterable(rest)]


def select(benchmarks: list[Benchmark], only: list[str], without: list[str], quick: bool) -> list[Benchmark]:
    """Return those that a pattern of ``only`` names, in its order, and none of ``without``. A pattern is part of a
    name; * stands for anything."""
    by_pattern = ([it for it in benchmarks if fnmatch(it.name, f"*{pattern}*")] for pattern in only)
    wanted = {it.name: it for it in chain.from_iterable(by_pattern)}  # each once
    named = [it for it in wanted.values() if not any(fnmatch(it.name, f"*{pattern}*") for pattern in without)]
    if not quick:
        return named
    first, best = places()[0], places()[-1]  # one thread; all, or the GPU
    order = [name.format(place=best, one=first if best.device == "cpu" else best) for name in QUICK]
    return sorted((it for it in named if it.name in order), key=lambda it: order.index(it.name))


def _single_ops(place: Place) -> Iterator[Benchmark]:
    for op, compare in (("unscale_", ops.compare_unscale), ("grad_stats", ops.compare_grad_stats)):
        for setting in lists(place):
            yield Benchmark(op, setting, partial(compare, setting), op)
    scale = Setting(place, "fp32", Case("a-scale"))
    yield Benchmark("update_scale_", scale, partial(ops.compare_update_scale, scale), "update_scale_")
    for setting in lists(place):
        if setting.case.name in LARGE:
            for variant, found in (("skipped", 1.0), ("not-skipped", 0.0)):
                prepare = partial(ops.compare_overflow, setting, found)
                yield Benchmark("overflow_", setting, prepare, "overflow_", "grad_stats", variant)


def _steps(place: Place) -> Iterator[Benchmark]:
    for setting in lists(place):
        case, dtype = setting.case.name, setting.dtype
        yield _step(setting)
        if dtype == "fp32" and case in LARGE:
            yield _step(setting, DEFAULT, steps.default, clock="loop")  # it waits, which no graph can hold
        if dtype == "bf16" and case in ("100x500k", "1x1e9"):
            yield _step(setting, variant="master-fp32", master="fp32")
            yield _step(setting, variant="moments-bf16", state_dtype=torch.bfloat16)
            yield _step(setting, variant="moments-8bit", state_dtype=torch.int8)
            yield _step(setting, variant="no-clipping", clips=False)
            prepare = partial(steps.compare_reporting, setting)
            yield Benchmark("step", setting, prepare, "adamw_", "ours without a report", "guarded")
        if dtype == "fp32" and case == "100x500k":
            for name, peer in peers.PEERS.items():
                variant = "moments-8bit" if peer.moments == torch.int8 else ""
                missing = peers.why_not(peer.module, peer.needs_cuda, place.device)
                yield _step(
                    setting,
                    name,
                    peers.maker(peer),
                    variant=variant,
                    missing=missing,
                    clock="loop",
                    state_dtype=peer.moments,
                )

    yield from _steps_without_scaler(place)
    if place.device == "cpu":
        setting = Setting(place, "fp32", sharded.CASE)
        prepare = partial(sharded.compare, setting)
        yield Benchmark("step", setting, prepare, "adamw_", BEST, "dtensors", sharded.why_not())
    for it in rules.comparisons(place, WITHOUT_SCALER, BEST):
        yield Benchmark("step", it.setting, it.prepare, it.op, it.baseline, it.rule, it.missing)


def _steps_without_scaler(place: Place) -> Iterator[Benchmark]:
    for case, dtype in product(STEPS, ("fp32", "bf16")):
        setting = Setting(place, dtype, case)
        prepare = partial(steps.compare_without_scaler, setting)
        yield Benchmark("step", setting, prepare, "adamw_", WITHOUT_SCALER)
        if dtype == "fp32" and place.device == "cpu":
            for variant, share in (("imports", 1.0), ("imports-clipping", 0.999)):  # another run must have what to clip
                prepare = partial(steps.compare_imports, setting, share)
                yield Benchmark("step", setting, prepare, "adamw_", WITHOUT_SCALER, variant)
    for dtype in ("bf16", "fp16"):
        setting = Setting(place, dtype, MATRICES[place.device])
        yield Benchmark(
            "step", setting, partial(steps.compare_muon, setting), "grad_stats", "torch Muon", "masters-muon"
        )


def _quick_steps(place: Place) -> Iterator[Benchmark]:
    bf16, fp32 = (Setting(place, dtype, QUICK_LIST) for dtype in ("bf16", "fp32"))
    yield _step(bf16)
    yield _step(bf16, DEFAULT, steps.default, clock="loop")
    yield _step(bf16, variant="moments-8bit", state_dtype=torch.int8)
    yield _step(fp32)


def _step(
    setting: Setting,
    baseline: str = BEST,
    theirs: steps.MakeOptimizer = steps.fused,
    *,
    variant: str = "",
    missing: str = "",
    clock: str = "",
    **options: Any,
) -> Benchmark:
    prepare = partial(steps.compare_steps, setting, theirs, clock or setting.case.clock, **options)
    return Benchmark("step", setting, prepare, "adamw_", baseline, variant, missing)


def _linear(place: Place) -> Iterator[Benchmark]:
    for shape in linear.SHAPES[place.device]:
        for dtype in ("bf16",) if place.device == "cuda" else ("bf16", "fp16", "fp32"):
            setting = Setting(place, dtype, linear.case(shape))
            baseline = "torch eager" if dtype == "fp32" else EAGER
            yield Benchmark("linear_act", setting, partial(linear.compare, setting), "linear_act", baseline)
            yield Benchmark("linear_dact", setting, partial(linear.compare_dact, setting), "linear_dact")
            if place.device == "cuda" and shape.rows in linear.MOST_TUNING:
                tuned = partial(linear.compare, setting, compiled=True)
                yield Benchmark("linear_act", setting, tuned, "linear_act", TUNED)
    for shape, activation, trains in product(linear.SMALL, ("gelu", "silu"), (True, False)):
        setting = Setting(place, "fp32", linear.case(shape))
        prepare = partial(linear.compare_function, setting, activation, trains)
        variant = f"function-{activation}{'' if trains else '-inference'}"
        yield Benchmark("linear_act", setting, prepare, "linear_act", "torch eager", variant)


def _blocks(place: Place) -> Iterator[Benchmark]:
    dtypes = ("bf16",) if place.device == "cuda" else ("bf16", "fp32")
    for shape, (name, block), dtype in product(blocks.SHAPES[place.device], blocks.BLOCKS.items(), dtypes):
        setting = Setting(place, dtype, linear.case(shape))
        ours, torchs = (partial(side, setting, name) for side in (blocks.ours, blocks.torchs))
        sides = {
            ("torch eager" if dtype == "fp32" else EAGER, ""): (ours(), torchs()),
            (TUNED, ""): (ours(), torchs(compiled=True)),
            (TUNED, "compiled"): (ours(compiled=True), torchs(compiled=True)),
        }
        if name in peers.LIGERS_BLOCKS:
            sides[LIGER, ""] = ours(), blocks.ligers(setting, name)
        for (baseline, variant), pair in sides.items():
            missing = peers.why_not(peers.LIGER, True, place.device) if baseline == LIGER else ""
            prepare = partial(blocks.compare, setting, name, *pair)
            yield Benchmark(name, setting, prepare, block.op, baseline, variant, missing)


def _training(place: Place) -> Iterator[Benchmark]:
    for name in training.TASKS:
        if name.startswith("gpt2") and place.device == "cpu":
            continue
        setting = Setting(place, "bf16", Case(name))
        ours, torchs = partial(training.ours, setting), partial(training.torchs, setting)
        sides = {
            (BEST, ""): (ours(), torchs(steps.fused)),
            (BEST, "split-master"): (ours(split_master=True), torchs(steps.fused)),
            (DEFAULT, ""): (ours(), torchs(steps.default)),
            ("torch.amp fused compiled", ""): (ours(), torchs(steps.fused, compiled=True)),
            ("torch.amp fused compiled", "compiled"): (ours(compiled=True), torchs(steps.fused, compiled=True)),
            ("torch fp32", ""): (ours(), training.torchs_fp32(setting)),
        }
        for (baseline, variant), pair in sides.items():
            prepare = partial(training.compare, setting, *pair)
            yield Benchmark("train", setting, prepare, "linear_act", baseline, variant)
