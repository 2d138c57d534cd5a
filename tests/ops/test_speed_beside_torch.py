"""Measures each op on a GPU, beside what torch has for the same; the summary after the tests prints the speeds. Such
short measurements prove nothing: ``pytest benchmarks/`` measures longer. Backwards are measured with their forwards."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from benchmarks import blocks, formatting, layers
from benchmarks.optimizers import RULES
from mpkernels.bench import linear, measuring, ops, steps
from mpkernels.bench.cases import Benchmark
from mpkernels.bench.settings import Place, Setting, Sizes
from tests.summary import SPEED

SMALLEST_GPU = 7 * 2**30  # bytes; the stand-in has less, and takes seconds for what a GPU does in microseconds


def rule_beside_torch(name, setting):
    rule = RULES[name]
    return steps.compare_without_scaler(setting, rule.ours, rule.theirs, rule.states)


def mlp_beside_torch(name, setting):
    return blocks.compare(setting, name, blocks.ours(setting, name), blocks.torchs(setting, name))


LIST_OPS = {
    "unscale_": ops.compare_unscale,
    "grad_stats": ops.compare_grad_stats,
    "adamw_": partial(rule_beside_torch, "adamw"),
    "adam_": partial(rule_beside_torch, "adam"),
    "sgd_": partial(rule_beside_torch, "sgd-momentum"),
}
LAYER_OPS = {
    "linear_act": linear.compare,
    "linear_dact": layers.compare_dact,
    "linear_gated": partial(mlp_beside_torch, "swiglu_mlp"),
}


def setting_of(op):
    is_gpu = torch.cuda.get_device_properties(0).total_memory >= SMALLEST_GPU
    list_of_tensors = Sizes("4x10M", ((10_000_000,),) * 4) if is_gpu else Sizes("4x1k", ((1000,),) * 4)
    shape = linear.Shape(4096, 1024, 4096) if is_gpu else linear.Shape(16, 16, 32)
    dtype, sizes = ("fp32", list_of_tensors) if op in LIST_OPS else ("bf16", shape.sizes())
    return Setting(Place("cuda", 1), dtype, sizes)


@pytest.mark.kernels("native", "triton")
@pytest.mark.parametrize("op", [*LIST_OPS, *LAYER_OPS])
def test_each_ops_speed_is_printed(target, record_property, op):
    if target.device.type != "cuda" or target.is_interpreted:
        pytest.skip("measures GPUs")
    setting = setting_of(op)
    case = Benchmark(op, setting, partial((LIST_OPS | LAYER_OPS)[op], setting), op)
    result = measuring.run_one(case, seconds=0.2, builds=1)
    torchs = formatting.speed(replace(result, ours_us=result.torch_us))
    record_property(SPEED, f"{op:12} {target.kernel:7} {formatting.speed(result)}, torch {torchs} ({setting})")
    assert min(result.ours_us + result.torch_us) > 0
