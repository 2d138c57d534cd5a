"""Masters does what users and libraries expect of an optimizer: groups, schedulers, hooks, scalers, closures."""

import warnings

import pytest
import torch
from torch.optim.lr_scheduler import OneCycleLR, StepLR

from mpkernels.optim import Masters
from mpkernels.optim.masters import true_weight
from tests.hard_grads import same_bits
from tests.networks import B16
from tests.optim.optimizers import each_scaler, scaler_of
from tests.optim.wrapped import all_params, give_grads, groups, parameters

MASTERS_OPTIONS = "max_norm", "guard", "group_by_group"


def around(kind=torch.optim.SGD, dtype=B16, **options):
    masters_options = {key: options.pop(key) for key in MASTERS_OPTIONS if key in options}
    return Masters(kind(groups(parameters(dtype)), **{"lr": 0.1, **options}), **masters_options)


def step(optimizer, seed=0, dtype=B16, **options):
    give_grads(all_params(optimizer), seed, dtype, **options)
    optimizer.step()


def test_groups_state_and_defaults_are_the_wrapped_ones():
    optimizer = around(momentum=0.9)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is optimizer.wrapped.param_groups
    step(optimizer)
    assert optimizer.state is optimizer.wrapped.state
    assert optimizer.defaults is optimizer.wrapped.defaults
    assert optimizer.state[all_params(optimizer)[0]].keys() == {"momentum_buffer", "remainder"}
    optimizer.wrapped.param_groups[0]["lr"] = 0.5
    assert optimizer.param_groups[0]["lr"] == 0.5
    before = list(map(id, all_params(optimizer)))
    step(optimizer)
    assert list(map(id, all_params(optimizer))) == before


@pytest.mark.parametrize("group_by_group", [False, True])
def test_the_wrapped_step_sees_fp32_alone(group_by_group):
    seen, have_memory = [], []

    class Looking(torch.optim.SGD):
        def step(self, closure=None):
            params = [it for group in self.param_groups for it in group["params"]]
            assert {it.dtype for it in params} == {torch.float32}
            assert {it.grad.dtype for it in params} == {torch.float32}
            assert not any("remainder" in self.state[it] for it in params)
            have_memory.append([it.untyped_storage().nbytes() > 0 for it in seen])
            seen.extend(it for it in params if it.shape != (4, 3))
            super().step(closure)

    optimizer = around(Looking, group_by_group=group_by_group)
    seen.clear()  # of the steps with which Masters tries whether the class remembers steps
    have_memory.clear()
    step(optimizer)
    assert len(seen) == 3
    assert have_memory == ([[], [False, False]] if group_by_group else [[]])


@pytest.mark.parametrize("scheduled", ["masters", "wrapped"])
@pytest.mark.parametrize("make", [lambda it: StepLR(it, 1, 0.5), lambda it: OneCycleLR(it, 0.5, total_steps=9)])
def test_schedulers_take_masters_and_the_wrapped_optimizer(scheduled, make):
    optimizer, bare = around(momentum=0.9), torch.optim.SGD(groups(parameters(torch.float32)), lr=0.1, momentum=0.9)
    schedulers = make(optimizer if scheduled == "masters" else optimizer.wrapped), make(bare)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(3):
            for it, scheduler in zip((optimizer, bare), schedulers, strict=True):
                step(it, seed)
                scheduler.step()
    assert schedulers[0].get_last_lr() == schedulers[1].get_last_lr()
    for param, other in zip(all_params(optimizer), all_params(bare), strict=True):
        assert same_bits(true_weight(param, optimizer.state[param]).float(), other)


def test_a_group_can_be_added():
    optimizer = around(momentum=0.9)
    step(optimizer)
    param = torch.nn.Parameter(torch.ones(3, dtype=B16))
    optimizer.add_param_group({"params": param, "lr": 1e-4})
    assert optimizer.param_groups[2]["momentum"] == 0.9
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert torch.equal(true_weight(param, optimizer.state[param]), torch.full((3,), 1 - 1e-4))
    with pytest.raises(ValueError, match="some parameters appear in more than one parameter group"):
        optimizer.add_param_group({"params": param})
    with pytest.raises(ValueError, match="Masters: optimizer must have differentiable=False, got True"):
        optimizer.add_param_group({"params": torch.nn.Parameter(torch.ones(3)), "differentiable": True})
    assert len(optimizer.param_groups) == 3


def test_states_that_add_param_group_makes_are_widened():
    class Early(torch.optim.SGD):
        def add_param_group(self, param_group):
            super().add_param_group(param_group)
            for param in self.param_groups[-1]["params"]:
                self.state[param]["momentum_buffer"] = torch.zeros_like(param)

    optimizer = around(Early, momentum=0.9)
    step(optimizer)
    param = torch.nn.Parameter(torch.ones(3, dtype=B16))
    optimizer.add_param_group({"params": [param]})
    step(optimizer, 1)
    for param in all_params(optimizer):
        assert optimizer.state[param]["momentum_buffer"].dtype == torch.float32


def test_hooks_around_state_dicts_get_masters_itself():
    optimizer, seen = around(), []
    optimizer.register_state_dict_pre_hook(lambda it: seen.append(it is optimizer))
    optimizer.register_state_dict_post_hook(lambda it, saved: saved | {"more": len(saved["state"])})
    optimizer.register_load_state_dict_pre_hook(lambda it, saved: seen.append(saved.pop("more")))
    optimizer.register_load_state_dict_post_hook(lambda it: seen.append(it is optimizer))
    step(optimizer)
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    assert seen == [True, 3, True]
    assert saved["more"] == 3


@each_scaler
def test_a_hook_never_sees_a_scaled_grad(whose):
    """The grads are bf16, because torch's scaler takes no fp16 grads."""
    optimizer, scaler, seen = around(), scaler_of(whose, init_scale=64.0), []
    optimizer.register_step_pre_hook(lambda it, *_: seen.append(all_params(it)[0].grad.clone()))
    give_grads(all_params(optimizer), 0, B16)
    grad = all_params(optimizer)[0].grad.clone()
    scaler.scale(torch.ones(()))
    give_grads(all_params(optimizer), 0, B16, scale=64.0)
    scaler.step(optimizer)
    assert torch.equal(seen[0], grad)


def test_hooks_of_ddp_stay_on_the_parameter():
    """DDP's hooks lie on the node that accumulates a grad; a parameter whose dtype changes gets another node."""
    param = torch.nn.Parameter(torch.ones(3, dtype=B16))
    optimizer, calls = Masters(torch.optim.SGD([param], lr=0.1)), []
    node = param.view_as(param).grad_fn.next_functions[0][0]
    node.register_hook(lambda *_: calls.append(1))
    for _ in range(2):
        param.sum().backward()
        optimizer.step()
    assert calls == [1, 1]


def test_torch_compile_leaves_a_step_uncompiled_and_refuses_a_full_graph():
    compiled, plain = around(momentum=0.9), around(momentum=0.9)
    run = torch.compile(compiled.step, backend="eager")
    for seed in range(3):
        give_grads(all_params(compiled), seed, B16)
        run()
        step(plain, seed)
    assert all(map(same_bits, all_params(compiled), all_params(plain)))
    give_grads(all_params(compiled), 3, B16)
    with pytest.raises(RuntimeError, match="Masters: step must not be part of a full graph"):
        torch.compile(lambda: compiled.step(), backend="eager", fullgraph=True)()
