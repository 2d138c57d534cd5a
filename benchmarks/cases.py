"""All cases: those of ``python -m mpkernels bench``, and more sizes, dtypes, ops and baselines."""

from collections.abc import Iterator
from functools import partial
from itertools import chain, product

import torch

from benchmarks import (
    adamw_beside_others,
    blocks,
    dtensor_step,
    fp32_training,
    layers,
    loss_scale,
    offload,
    optimizers,
    other_libraries,
)
from benchmarks.tensor_lists import lists
from mpkernels.bench import cases, linear, ops, steps, training
from mpkernels.bench.cases import BEST, DEFAULT, EAGER, WITHOUT_SCALER, Benchmark, step
from mpkernels.bench.settings import FOUR_LARGE, HUNDRED, THOUSAND, Place, Setting, Sizes, places

TUNED = "torch.compile max-autotune"
LIGER = "liger-kernel"
SHORT = Sizes("20x350k", ((350_000,),) * 20)


def _gpt2(width: int) -> tuple[tuple[int, int], ...]:
    """Return the shapes of 24 of GPT-2's layers."""
    return ((3 * width, width), (width, width), (4 * width, width), (width, 4 * width)) * 24


MATRICES = {  # for Muon. On CPUs they are small, because bf16 products are slow on many.
    "cpu": (Sizes("4x96x96", ((96, 96),) * 4), Sizes("16x8x8", ((8, 8),) * 16), Sizes("gpt2-128", _gpt2(128))),
    "cuda": (Sizes("16x1024x1024", ((1024, 1024),) * 16), Sizes("gpt2-1024", _gpt2(1024))),
}


def all_cases() -> list[Benchmark]:
    on_each = (chain(_single_ops(place), _steps(place)) for place in places())
    best = places()[-1]  # where whole networks run: on the GPU if there is one, else on all cores
    more = chain(chain.from_iterable(on_each), _linear(best), _blocks(best), _training(best))
    return list({it.name: it for it in [*more, *cases.all_cases()]}.values())


def _single_ops(place: Place) -> Iterator[Benchmark]:
    for op, compare in (("unscale_", ops.compare_unscale), ("grad_stats", ops.compare_grad_stats)):
        for setting in lists(place):
            yield Benchmark(op, setting, partial(compare, setting), op)
    scale = Setting(place, "fp32", Sizes("a-scale"))
    yield Benchmark("update_scale_", scale, partial(loss_scale.compare_update_scale, scale), "update_scale_")
    for setting in lists(place):
        if setting.sizes in (HUNDRED, THOUSAND):
            for variant, found in (("skipped", 1.0), ("not-skipped", 0.0)):
                prepare = partial(loss_scale.compare_overflow, setting, found)
                yield Benchmark("overflow_", setting, prepare, "overflow_", "grad_stats", variant)


def _steps(place: Place) -> Iterator[Benchmark]:
    for setting in lists(place):
        yield step(setting)
        if setting.dtype == "fp32" and setting.sizes in (HUNDRED, THOUSAND):
            yield step(setting, DEFAULT, steps.default, clock="loop")  # it waits, which a CUDA graph can't hold
        if setting.dtype == "bf16" and setting.sizes.name in (HUNDRED.name, "1x1e9"):
            yield step(setting, variant="master-fp32", master="fp32")
            yield step(setting, variant="moments-bf16", state_dtype=torch.bfloat16)
            yield step(setting, variant="moments-8bit", state_dtype=torch.int8)
            yield step(setting, variant="no-clipping", clips=False)
            prepare = partial(optimizers.compare_reporting, setting)
            yield Benchmark("step", setting, prepare, "adamw_", "ours without a report", "guarded")
    yield from adamw_beside_others.comparisons(place)
    yield from _steps_without_scaler(place)
    if place.device == "cpu":
        setting = Setting(place, "fp32", dtensor_step.SIZES)
        prepare = partial(dtensor_step.compare, setting)
        yield Benchmark("step", setting, prepare, "adamw_", BEST, "dtensors", dtensor_step.why_not())
    yield from optimizers.comparisons(place)
    yield from offload.comparisons(place)


def _steps_without_scaler(place: Place) -> Iterator[Benchmark]:
    for sizes, dtype in product((SHORT, FOUR_LARGE, HUNDRED, THOUSAND), ("fp32", "bf16")):
        setting = Setting(place, dtype, sizes)
        prepare = partial(steps.compare_without_scaler, setting)
        yield Benchmark("step", setting, prepare, "adamw_", WITHOUT_SCALER)
        if dtype == "fp32" and place.device == "cpu":
            # Below 1, so that the grads of each run still exceed the bound.
            for variant, share in (("imports", 1.0), ("imports-clipping", 0.999)):
                prepare = partial(steps.compare_imports, setting, share)
                yield Benchmark("step", setting, prepare, "adamw_", WITHOUT_SCALER, variant)
    for sizes in MATRICES[place.device]:
        yield from optimizers.muons(place, sizes)


def _linear(place: Place) -> Iterator[Benchmark]:
    for shape in layers.SHAPES[place.device]:
        for dtype in ("bf16",) if place.device == "cuda" else ("bf16", "fp16", "fp32"):
            setting = Setting(place, dtype, shape.sizes())
            baseline = "torch eager" if dtype == "fp32" else EAGER
            yield Benchmark("linear_act", setting, partial(linear.compare, setting), "linear_act", baseline)
            yield Benchmark("linear_dact", setting, partial(layers.compare_dact, setting), "linear_dact")
            if place.device == "cuda" and shape.rows in layers.MOST_TUNING:
                tuned = partial(linear.compare, setting, compiled=True)
                yield Benchmark("linear_act", setting, tuned, "linear_act", TUNED)
    for shape, activation, trains in product(layers.SMALL, ("gelu", "silu"), (True, False)):
        setting = Setting(place, "fp32", shape.sizes())
        prepare = partial(layers.compare_function, setting, activation, trains)
        variant = f"function-{activation}{'' if trains else '-inference'}"
        yield Benchmark("linear_act", setting, prepare, "linear_act", "torch eager", variant)


def _blocks(place: Place) -> Iterator[Benchmark]:
    dtypes = ("bf16",) if place.device == "cuda" else ("bf16", "fp32")
    for shape, (name, block), dtype in product(blocks.SHAPES[place.device], blocks.BLOCKS.items(), dtypes):
        setting = Setting(place, dtype, shape.sizes())
        ours, torchs = (partial(side, setting, name) for side in (blocks.ours, blocks.torchs))
        sides = {
            ("torch eager" if dtype == "fp32" else EAGER, ""): (ours(), torchs()),
            (TUNED, ""): (ours(), torchs(compiled=True)),
            (TUNED, "compiled"): (ours(compiled=True), torchs(compiled=True)),
        }
        if name in other_libraries.LIGERS_BLOCKS:
            sides[LIGER, ""] = ours(), blocks.ligers(setting, name)
        for (baseline, variant), pair in sides.items():
            missing = other_libraries.why_not(other_libraries.LIGER, True, place.device) if baseline == LIGER else ""
            prepare = partial(blocks.compare, setting, name, *pair)
            yield Benchmark(name, setting, prepare, block.op, baseline, variant, missing)


def _training(place: Place) -> Iterator[Benchmark]:
    for name in training.tasks_on(place.device):
        setting = Setting(place, "bf16", Sizes(name))
        ours, torchs = partial(training.ours, setting), partial(training.torchs, setting)
        sides = {
            (DEFAULT, ""): (ours(), torchs(steps.default)),
            ("torch.amp fused compiled", ""): (ours(), torchs(steps.fused, compiled=True)),
            ("torch.amp fused compiled", "compiled"): (ours(compiled=True), torchs(steps.fused, compiled=True)),
            ("torch fp32", ""): (ours(), fp32_training.train(setting)),
        }
        for (baseline, variant), pair in sides.items():
            prepare = partial(training.compare, *pair)
            yield Benchmark("train", setting, prepare, "linear_act", baseline, variant)
