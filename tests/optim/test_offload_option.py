"""offload=True changes nothing where there is no GPU. tests/cuda tests what it does on one."""

import pytest
import torch

import mpkernels
from mpkernels.amp import GradScaler
from mpkernels.optim import AdamW, Masters
from tests.networks import B16, F16
from tests.optim.optimizers import all_same_bits, assert_same_states, each_of_any_shape, saved_numbers


def parameters(dtype):
    return [torch.nn.Parameter(torch.linspace(-1, 1, size).to(dtype)) for size in (7, 300, 1)]


def trained(optimizer, scaled, released=False):
    params = optimizer.param_groups[0]["params"]
    scaler = GradScaler("cpu", init_scale=4.0, enabled=scaled)
    if released:
        optimizer.release_grads(scaler)
    for step in range(4):
        loss = sum((param.float() * (step + 1 + i)).sum() for i, param in enumerate(params))
        scaler.scale(loss * (float("inf") if step == 2 else 1)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return params


@each_of_any_shape
@pytest.mark.parametrize("dtype", [torch.float32, B16, F16])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("released", [False, True])
def test_parameters_on_the_host_step_as_without_offload(line, dtype, scaled, released):
    ours, plain = (line.ours(parameters(dtype), offload=offload, max_norm=1.0) for offload in (True, False))
    assert all_same_bits(trained(ours, scaled, released), trained(plain, scaled, released))
    assert_same_states(saved_numbers(ours), saved_numbers(plain))
    assert (ours.skipped_steps, str(ours.overflow_report())) == (plain.skipped_steps, str(plain.overflow_report()))
    assert len(ours._offload.twins) == 0


def test_masters_refuse_offload():
    with pytest.raises(TypeError, match="offload"):
        Masters(torch.optim.SGD(parameters(B16), lr=0.1), offload=True)


def test_stream_needs_a_gpu_and_cpu_is_a_name_for_true():
    params = parameters(B16)
    assert AdamW(params, offload="cpu").offload is True
    with pytest.raises(TypeError, match="AdamW: offload must be True, False, 'cpu' or 'stream', got 'gpu'"):
        AdamW(params, offload="gpu")
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="AdamW: offload='stream' needs a GPU, got a machine without one"):
            AdamW(params, offload="stream")


def test_memory_report_tells_what_is_on_the_host():
    model = torch.nn.Linear(8, 8).bfloat16()
    optimizer = AdamW(model.parameters(), offload=True)
    model(torch.ones(1, 8).bfloat16()).sum().backward()
    optimizer.step()
    found = mpkernels.memory_report(model, optimizer)
    on_host = found.device["of these, masters and moments on the host"]
    assert on_host == found.measured["masters"] + found.measured["moments"] > 0
    assert "masters and moments on the host" in str(found)
