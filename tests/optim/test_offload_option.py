"""offload=True changes nothing where there is no GPU. tests/cuda tests what it does on one."""

import copy
import pickle

import pytest
import torch

from mpkernels.amp import GradScaler
from mpkernels.optim import AdamW, Masters
from tests.networks import B16, F16
from tests.optim.optimizers import all_same_bits, assert_same_states, each_optimizer, saved_numbers


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


@each_optimizer
@pytest.mark.parametrize("dtype", [torch.float32, B16, F16])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("released", [False, True])
def test_parameters_on_the_host_step_as_without_offload(line, dtype, scaled, released):
    ours, plain = (line.ours(parameters(dtype), offload=offload, max_norm=1.0) for offload in (True, False))
    assert all_same_bits(trained(ours, scaled, released), trained(plain, scaled, released))
    assert_same_states(saved_numbers(ours), saved_numbers(plain))
    assert (ours.skipped_steps, str(ours.overflow_report())) == (plain.skipped_steps, str(plain.overflow_report()))
    assert len(ours._offload.twins) == 0


@each_optimizer
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_a_copy_keeps_the_option(line, duplicate):
    optimizer = line.ours(parameters(B16), offload=True)
    other = duplicate(optimizer)
    assert (other.offload, repr(other)) == (True, repr(optimizer))
    assert "process_group: None, offload: True\n" in repr(other)
    assert "offload" not in repr(line.ours(parameters(B16)))
    assert other._offload is not optimizer._offload


@each_optimizer
def test_bad_values_are_refused(line):
    name = line.kind.__name__
    with pytest.raises(TypeError, match=f"{name}: offload must be True or False, got 'cpu'"):
        line.ours(parameters(B16), offload="cpu")
    optimizer = line.ours(parameters(B16))
    with pytest.raises(ValueError, match=f"{name}: offload must be given to the optimizer, for all parameters"):
        optimizer.add_param_group({"params": parameters(B16), "offload": True})
    assert len(optimizer.param_groups) == 1
    with pytest.raises(ValueError, match=f"{name}: a group has no option 'offloaded'; did you mean 'offload'"):
        optimizer.add_param_group({"params": parameters(B16), "offloaded": True})


def test_differentiable_steps_and_masters_refuse_offload():
    with pytest.raises(ValueError, match="differentiable=True is torch's own step, without process_group and offload"):
        AdamW(parameters(torch.float32), differentiable=True, offload=True)
    with pytest.raises(TypeError, match="offload"):
        Masters(torch.optim.SGD(parameters(B16), lr=0.1), offload=True)


@pytest.mark.exhaustive
def test_a_compiled_step_on_the_host_needs_no_break():
    results = []
    for offload in (True, False):
        params = parameters(B16)
        optimizer = AdamW(params, lr=0.1, offload=offload)
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
        torch.compile(optimizer.step, fullgraph=True, backend="eager")()
        results.append([param.detach().clone() for param in params])
    assert all_same_bits(*results)
