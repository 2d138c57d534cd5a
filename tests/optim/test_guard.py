"""When AdamW's steps look for an inf or NaN, what they then tell, and what an overflow is."""

import copy

import pytest
import torch

import mpkernels
from mpkernels.optim import AdamW
from tests.networks import B16, F16, backward, network, train
from tests.optim.optimizers import each_with_masters


def test_an_fp16_norm_beyond_65504_is_no_overflow():
    """torch stores that norm as inf, the coefficient becomes 0, and every grad is silently zero."""
    param = torch.nn.Parameter(torch.ones(100, dtype=F16))
    param.grad = torch.full_like(param, 60000.0)
    optimizer = AdamW([param], lr=0.1, max_norm=1.0)
    optimizer.step()
    assert optimizer.grad_norm.item() == pytest.approx(600000.0)
    assert optimizer.skipped_steps.item() == 0
    assert (param < 0.95).all()


@each_with_masters
def test_a_step_of_fp32_grads_alone_checks_none(line):
    optimizer = line.ours((model := network()).parameters())
    train(model, optimizer, 1)
    assert (optimizer.grad_norm, optimizer.skipped_steps, optimizer.step_was_skipped) == (None, None, None)


def test_a_step_of_fp32_grads_beside_a_frozen_bf16_parameter_checks_none():
    model = network()
    optimizer = AdamW([*model.parameters(), torch.nn.Parameter(torch.ones(2, dtype=B16))])
    train(model, optimizer, 1)
    assert optimizer.grad_norm is None
    assert optimizer.skipped_steps is None


@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_a_guarded_step_is_skipped_if_only_the_scaler_found_an_inf(target, max_norm):
    param = torch.nn.Parameter(torch.ones(3, device=target.device, dtype=B16))
    optimizer = AdamW([param], guard=True, max_norm=max_norm)
    param.grad = torch.ones_like(param)
    optimizer.grad_scale, optimizer.found_inf = (torch.ones((), device=target.device) for _ in range(2))
    optimizer.step()
    assert param.tolist() == [1.0] * 3
    assert optimizer.skipped_steps.item() == 1


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("options", [{"guard": True}, {"max_norm": 1.0}], ids=str)
def test_the_guard_skips_a_nan_that_came_after_the_scaler_looked(options, backend):
    with mpkernels.backend(backend):
        model = network()
        optimizer, scaler = AdamW(model.parameters(), **options), torch.amp.GradScaler("cpu", init_scale=2.0)
        for seed in range(2):
            backward(model, seed, scaler.scale(torch.ones(())).item())
            before = copy.deepcopy(list(model.parameters()))
            scaler.unscale_(optimizer)
            if seed == 1:
                model[0].bias.grad[0] = float("nan")
            scaler.step(optimizer)
            scaler.update()
        assert all(map(torch.equal, model.parameters(), before))
        assert optimizer.skipped_steps.item() == 1


@pytest.mark.parametrize("without", ["grads", "guard"])
def test_a_step_without_grads_or_guard_reports_no_outcome(without):
    model = network()
    optimizer = AdamW(model.parameters(), max_norm=1.0)
    backward(model, 0)
    model[0].bias.grad[0] = float("nan")
    optimizer.step()
    assert (optimizer.step_was_skipped.item(), optimizer.grad_norm.isnan().item()) == (1.0, True)
    if without == "grads":
        optimizer.zero_grad()
    else:
        backward(model, 1)
        optimizer.max_norm = None
    optimizer.step()
    assert (optimizer.step_was_skipped, optimizer.grad_norm, optimizer.skipped_steps.item()) == (None, None, 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, B16, F16], ids=str)
def test_a_scalers_step_without_max_norm_computes_no_norm(dtype):
    """torch's scaler has looked for infs. The guard of 16-bit parameters would read all grads once more."""
    weight = torch.nn.Parameter(torch.ones(3, dtype=dtype))
    optimizer, scaler = AdamW([weight]), torch.amp.GradScaler("cpu")
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    assert optimizer.grad_norm is None
