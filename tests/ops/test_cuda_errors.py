"""What ops ask of CUDA: whichever call fails, the user hears of it; all work goes to the current stream."""

import itertools

import pytest
import torch

from mpkernels.doctor.samples import SAMPLES
from mpkernels.ops import _registry
from tests.ops.test_ops import ARGUMENTS
from tests.targets import emulated_variable


def long_list(device):
    return [
        [torch.ones(1) for _ in range(1355)],
        torch.zeros(()),
        torch.ones(()),
    ]  # one more than a launch's parameters hold


@pytest.fixture
def calls_to_failure(emulated):
    calls = emulated_variable("emulation_calls_to_failure")
    yield calls
    calls.value = 0


@pytest.mark.parametrize(("name", "make"), (ARGUMENTS | {"unscale_": long_list}).items())
def test_a_failed_call_is_an_error(calls_to_failure, name, make):
    for call in itertools.count(1):
        calls_to_failure.value = call
        try:
            _registry._ops[name](*make(torch.device("cpu")))
        except RuntimeError as error:
            says = (
                f"{name}: CUDA says cudaErrorMemoryAllocation: out of memory",
                "torch could not multiply two matrices",
            )
            assert any(it in str(error) for it in says)  # noqa: PT017
        else:
            break
    assert calls_to_failure.value > 0, f"CUDA's call {call} failed, and nobody was told"
    assert call > 1, "no call was made to fail"


@pytest.mark.parametrize(("name", "make"), ARGUMENTS.items())
def test_the_current_device_is_back_after_an_op_on_another(calls_to_failure, name, make):
    device = emulated_variable("emulation_device")
    _registry._ops[name](*make(torch.device("cpu")))
    assert device.value == 0
    calls_to_failure.value = 1
    with pytest.raises(RuntimeError):
        _registry._ops[name](*make(torch.device("cpu")))
    assert device.value == 0


@pytest.mark.parametrize("name", SAMPLES)
def test_all_work_is_given_to_the_current_stream(emulated, name, monkeypatch):
    """Nothing orders another stream after the one on which torch has written what the kernels read."""
    monkeypatch.setattr(emulated_variable("emulation_stream"), "value", 1)
    for sample in SAMPLES[name]:
        _registry._ops[name](*sample.arguments(torch.device("cpu")))
