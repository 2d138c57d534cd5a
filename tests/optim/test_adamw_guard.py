"""AdamW skips a step whose grads hold an inf or NaN: by its guard, by a scaler, while it clips."""

import copy

import pytest
import torch

import mpkernels
from mpkernels.optim import AdamW
from tests.networks import B16, F16, assert_close, backward, network, train


def test_an_fp16_norm_beyond_65504_is_no_overflow():
    """torch stores that norm as inf, the coefficient becomes 0, and every grad is silently zero."""
    param = torch.nn.Parameter(torch.ones(100, dtype=F16))
    param.grad = torch.full_like(param, 60000.0)
    optimizer = AdamW([param], lr=0.1, max_norm=1.0)
    optimizer.step()
    assert optimizer.grad_norm.item() == pytest.approx(600000.0)
    assert optimizer.skipped_steps.item() == 0
    assert (param < 0.95).all()


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.float32, B16, F16], ids=str)
def test_the_guard_skips_a_step_with_an_inf_or_nan(dtype, bad):
    model = network(dtype)
    optimizer = AdamW(model.parameters(), guard=True if dtype == torch.float32 else None)
    train(model, optimizer, 2)
    states = [optimizer.state[param] for param in model.parameters()]
    before = copy.deepcopy((model.state_dict(), states))
    backward(model, 5)
    model[3].bias.grad[2] = bad
    optimizer.step()
    torch.testing.assert_close((model.state_dict(), states), before, rtol=0, atol=0)
    assert_bool(optimizer.step_was_skipped, True)
    assert optimizer.skipped_steps.item() == 1.0
    train(model, optimizer, 1)
    assert_bool(optimizer.step_was_skipped, False)
    assert optimizer.skipped_steps.item() == 1.0


def assert_bool(flag, expected):
    """Assert a 0-dim bool on the host."""
    assert (flag.dtype, flag.shape, flag.device.type) == (torch.bool, (), "cpu")
    assert flag.item() is expected


@pytest.mark.parametrize("frozen", [[], [torch.nn.Parameter(torch.ones(2, dtype=B16))]], ids=["alone", "beside bf16"])
def test_a_step_of_fp32_grads_alone_checks_none(frozen):
    model = network()
    optimizer = AdamW([*model.parameters(), *frozen])
    train(model, optimizer, 1)
    assert optimizer.grad_norm is None
    assert optimizer.skipped_steps is None


def test_an_inf_that_the_scaler_has_found_skips_the_step_though_the_user_removes_it():
    for kernel in mpkernels.backends("adamw_", "cpu"):
        param, scaler = torch.nn.Parameter(torch.ones(2)), torch.amp.GradScaler("cpu")
        optimizer = AdamW([param], guard=True)
        scaler.scale(param.sum()).backward()
        param.grad[0] = torch.inf
        with mpkernels.backend(kernel):
            scaler.unscale_(optimizer)
            param.grad.nan_to_num_(posinf=0.0)
            scaler.step(optimizer)
        assert optimizer.skipped_steps == 1, kernel
        assert (param == 1).all()


@pytest.mark.parametrize("user_unscales", [False, True])
def test_under_torchs_grad_scaler_it_trains_and_skips_as_torchs(user_unscales):
    ours, theirs = network(), network()
    optimizers = AdamW(ours.parameters()), torch.optim.AdamW(theirs.parameters(), foreach=False)
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4) for _ in range(2)]
    for seed in range(20):
        for model, optimizer, scaler in zip((ours, theirs), optimizers, scalers, strict=True):
            backward(model, seed, scaler.scale(torch.ones(())).item())
            if seed in (3, 11):
                model[0].weight.grad[0, 0] = float("inf")
            if user_unscales:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale()
        assert_close(ours, theirs, 2 * (seed + 1))
    assert optimizers[0].skipped_steps.item() == 2
    assert not hasattr(optimizers[0], "grad_scale")


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("options", [{"guard": True}, {"max_norm": 1.0}], ids=str)
def test_the_guard_skips_a_nan_that_came_after_the_scaler_looked(options, backend):
    """The scaler looked at the grads before the user broke them."""
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
    """Such a step reports nothing, not even the outcome of the step before."""
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


def test_an_unguarded_inf_gives_an_exp_avg_of_inf_where_torchs_may_be_nan():
    """docs/differences.md: torch's exp_avg is NaN for a beta1 of 0.5 or less; the weight is NaN under both."""
    for beta1, expected in ((0.9, "inf"), (0.5, "nan")):
        for kind, is_torchs in ((AdamW, False), (torch.optim.AdamW, True)):
            weight = torch.nn.Parameter(torch.ones(1))
            weight.grad = torch.full_like(weight, float("inf"))
            optimizer = kind([weight], betas=(beta1, 0.99))
            optimizer.step()
            assert str(optimizer.state[weight]["exp_avg"].item()) == (expected if is_torchs else "inf")
            assert weight.isnan().all()


def test_exp_avg_after_a_large_and_a_small_grad_is_torchs_but_for_a_rounding():
    """docs/differences.md says that it differs for a beta1 of 0.5 or less: by a rounding of the large grad at most."""
    for beta1 in (0.0, 0.25, 0.5, 0.9):
        ours, theirs = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
        optimizers = AdamW([ours], betas=(beta1, 0.999)), torch.optim.AdamW([theirs], betas=(beta1, 0.999))
        for grad in (torch.tensor([30.0, -7.0]), torch.tensor([3e-7, 2e-6])):
            for param, optimizer in zip((ours, theirs), optimizers, strict=True):
                param.grad = grad.clone()
                optimizer.step()
        found, torchs = (it.state[param]["exp_avg"] for it, param in zip(optimizers, (ours, theirs), strict=True))
        error_of_the_largest = 2 * torch.finfo(torch.float32).eps * torch.tensor([30.0, 7.0])
        assert ((found - torchs).abs() <= error_of_the_largest).all()
        assert beta1 > 0 or (found[0] == 0 and torchs[0] == grad[0])
