"""The prediction: the bytes that are counted, and the time that they take on each GPU."""

import pytest
import torch

from benchmarks import counted
from mpkernels.bench import roofline, steps
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
