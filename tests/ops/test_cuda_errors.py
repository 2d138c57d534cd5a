"""Whichever of an op's calls to CUDA fails, the user gets an error; and all work goes to the current stream."""

import itertools

import pytest
import torch

from mpkernels.doctor.samples import SAMPLES
from mpkernels.ops import _registry
from tests.ops.test_ops import ARGUMENTS
from tests.targets import emulated_variable


def list_for_two_launches(device):
    """Return arguments of unscale_, with one tensor more than the parameters of a launch hold."""
    return [[torch.ones(1) for _ in range(1355)], torch.zeros(()), torch.ones(())]


@pytest.fixture
def calls_to_failure(emulated):
    calls = emulated_variable("emulation_calls_to_failure")
    yield calls
    calls.value = 0


@pytest.mark.parametrize(("name", "make"), (ARGUMENTS | {"unscale_": list_for_two_launches}).items())
def test_whichever_call_fails_an_error_is_raised(calls_to_failure, name, make):
    for call in itertools.count(1):
        calls_to_failure.value = call
        try:
            _registry._ops[name](*make(torch.device("cpu")))
        except RuntimeError as error:
            expected = (
                f"{name}: CUDA says cudaErrorMemoryAllocation: out of memory",
                "torch could not multiply two matrices",
            )
            assert any(text in str(error) for text in expected)  # noqa: PT017
        else:
            break
    assert calls_to_failure.value > 0, f"CUDA's call {call} failed, and nobody was told"
    assert call > 1, "no call was made to fail"


@pytest.mark.parametrize(("name", "make"), ARGUMENTS.items())
def test_an_op_restores_the_current_device_even_if_it_fails(calls_to_failure, name, make):
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
