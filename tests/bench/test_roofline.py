"""The prediction: the bytes that are counted, and the time that they take on each GPU."""

import pytest
import torch

from benchmarks import counted
from mpkernels.bench import roofline, rules, steps
from mpkernels.bench.roofline import GPUS, Work
from tests.optim.test_step_costs import COSTS


@pytest.mark.parametrize(
    ("dtype", "options", "kept", "moved"), [case for case in COSTS if "master" not in case[1]], ids=str
)
def test_bytes_that_are_predicted_are_those_that_are_counted(dtype, options, kept, moved):
    state_dtype = options.get("state_dtype", torch.float32)
    scales = 4 * 4 / 256 if state_dtype == torch.int8 else 0  # of two moments, read and written
    assert steps.bytes_of_our_step(dtype, state_dtype) == moved + scales
    assert steps.bytes_of_torchs_step() == 48


@pytest.mark.parametrize(("name", "alone", "scaled"), [
    ("adamw", 1.25, 1.5), ("adam", 1.25, 1.5), ("sgd-momentum", 4 / 3, 5 / 3), ("sgd", 1.5, 2.0),
])  # fmt: skip
def test_what_the_bytes_of_each_rule_allow(name, alone, scaled):
    """The states are those that the optimizers have; lion is beside a library that isn't fused."""
    param = torch.nn.Parameter(torch.ones(8))
    param.grad = torch.ones(8)
    rule = rules.RULES[name]
    for make in (rule.ours, rule.theirs):
        optimizer = make([param])
        optimizer.step()
        assert sum(it is not None and it.numel() > 1 for it in optimizer.state[param].values()) == rule.states
    ours = steps.bytes_of_our_step(torch.float32, states=rule.states)
    assert steps.bytes_of_torchs_step(rule.states, unscales=False) / ours == pytest.approx(alone)
    assert steps.bytes_of_torchs_step(rule.states) / ours == pytest.approx(scaled)


@pytest.mark.parametrize(
    ("dtype", "variant", "ratio"),
    [("fp32", "", "1.50"), ("bf16", "", "1.71"), ("bf16", "moments-bf16", "2.40"), ("bf16", "moments-8bit", "2.99")],
)
def test_the_prediction_of_a_large_step_is_that_of_its_bytes(dtype, variant, ratio):
    for gpu in GPUS.values():
        assert f"{roofline.ratio(gpu, *counted.step(dtype, variant, '1x1e9')):.2f}" == ratio


def test_a_prediction():
    gpu = roofline.find("NVIDIA H200")
    assert gpu is GPUS["H200"]
    assert roofline.find("Abacus") is None
    assert Work(4.3e12).seconds(gpu) == pytest.approx(1)  # as measured, DESIGN's figures
    assert Work(0, 790e12).seconds(gpu) == pytest.approx(1)
    assert Work(4.3e12, 790e12, 10).seconds(gpu) == pytest.approx(2)
    assert Work(0, 0, 10).seconds(gpu) == 10 * roofline.LAUNCH


def test_fusing_pays_where_activations_weigh_most():
    """At small K; at K >= 4096 it is a few percent."""
    narrow, wide = (
        roofline.ratio(GPUS["H200"], *counted.linear_act(it)) for it in ((8192, 768, 3072), (8192, 4096, 16384))
    )
    assert 1.1 < narrow < 1.3
    assert 1.0 < wide < 1.06
