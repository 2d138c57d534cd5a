"""A step reuses what the last one found out about its tensors, and notices whatever has changed meanwhile."""

import copy
import gc

import pytest
import torch

import mpkernels
from mpkernels.optim import AdamW
from tests.cases import same_bits
from tests.networks import B16, backward, network, one_thread

__all__ = ["one_thread"]  # a fixture that each test uses


def tables_of(optimizer):
    return list(optimizer._plans)


def step_both(pairs, seed):
    for model, optimizer in pairs:
        backward(model, seed)
        optimizer.step()


@pytest.fixture(params=[torch.float32, B16], ids=str)
def pairs(request, target):
    """The target's, whose tables live on, and the reference's, which starts each step from nothing."""
    if target.kernel == "triton":
        pytest.skip("is called with lists in each step")
    models = network(request.param), network(request.param)
    made = [(model, AdamW(model.parameters(), lr=1e-2)) for model in models]
    step_both(made, 0)
    return made


def assert_same(pairs):
    for seed in (1, 2):
        for model, optimizer in pairs:
            backward(model, seed)
            if optimizer is pairs[1][1]:
                optimizer._start_afresh()
            optimizer.step()
    ours, theirs = (list(model.parameters()) for model, _ in pairs)
    assert all(map(same_bits, ours, theirs))
    for a, b in zip(ours, theirs, strict=True):
        states = [optimizer.state[param] for param, (_, optimizer) in zip((a, b), pairs, strict=True)]
        torch.testing.assert_close(*states, rtol=0, atol=0)


def test_nothing_is_made_anew_while_nothing_changes(pairs):
    _model, optimizer = pairs[0]
    before = tables_of(optimizer)
    step_both(pairs, 1)
    optimizer.zero_grad(set_to_none=False)
    step_both(pairs, 2)
    assert all(a is b for a, b in zip(tables_of(optimizer), before, strict=True))


CHANGES = {}


def change(function):
    CHANGES[function.__name__] = function
    return function


@change
def moved(model, optimizer):
    for param in model.parameters():
        param.data = param.data.clone()


@change
def restrided(model, optimizer):
    weight = model[0].weight
    weight.data = weight.data.t().contiguous().t()
    weight.grad = None


@change
def restrided_in_place(model, optimizer):
    """At the same address, with other strides."""
    weight = model[0].weight
    plain = weight.detach().clone()
    weight.data = weight.data.as_strided(weight.shape, (1, weight.shape[0]))
    with torch.no_grad():
        weight.copy_(plain)
    weight.grad = None


@change
def swapped(model, optimizer):
    twin = torch.nn.Parameter(model[0].weight.detach().clone() * 2)
    torch.utils.swap_tensors(model[0].weight, twin)


@change
def replaced(model, optimizer):
    old, new = model[3].bias, torch.nn.Parameter(torch.ones_like(model[3].bias))
    model[3].bias = new
    optimizer.state[new] = optimizer.state.pop(old)
    params = optimizer.param_groups[0]["params"]
    params[next(i for i, each in enumerate(params) if each is old)] = new


@change
def frozen(model, optimizer):
    model[0].bias.requires_grad_(False)
    model[0].bias.grad = None


@change
def states_moved(model, optimizer):
    for state in optimizer.state.values():
        for key, value in state.items():
            state[key] = value.clone()


@change
def states_moved_beneath(model, optimizer):
    for state in optimizer.state.values():
        for value in state.values():
            value.data = value.data.clone()


@change
def state_dict_of_one_replaced(model, optimizer):
    weight = model[0].weight
    optimizer.state[weight] = {key: value * 0 + 1 for key, value in optimizer.state[weight].items()}


@change
def last_state_forgotten(model, optimizer):
    del optimizer.state[model[3].bias]


@change
def resumed(model, optimizer):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


@change
def group_added(model, optimizer):
    model.register_parameter("extra", torch.nn.Parameter(torch.ones(3, dtype=model[0].weight.dtype)))
    model.extra.register_hook(lambda grad: grad)
    optimizer.add_param_group({"params": [model.extra], "lr": 0.5})
    model.extra.grad = torch.ones_like(model.extra)


@change
def moved_to_another_group(model, optimizer):
    """The order of all parameters stays the same."""
    params = optimizer.param_groups[0]["params"]
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))], "lr": 0.5})
    optimizer.param_groups[1]["params"][:] = params[-2:-1]
    del params[-2]
    backward(model, 9)
    optimizer.step()
    optimizer.param_groups[1]["params"].insert(0, params.pop())


@change
def scheduled(model, optimizer):
    optimizer.param_groups[0] |= {"lr": 0.1, "betas": (0.5, 0.6), "eps": 0.1, "weight_decay": 0.5, "maximize": True}


@change
def grads_of_another_layout(model, optimizer):
    weight = model[0].weight
    weight.register_hook(lambda grad: grad.t().contiguous().t())


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_is_noticed(pairs, change):
    for model, optimizer in pairs:
        change(model, optimizer)
    assert_same(pairs)


def test_a_resized_parameter_is_an_error_before_anything_moves(pairs):
    model, optimizer = pairs[0]
    backward(model, 1)
    model[3].bias.data = model[3].bias.data[:3]
    before = copy.deepcopy(list(model.parameters()))
    with pytest.raises((ValueError, RuntimeError), match="must have the parameter's shape"):
        optimizer.step()
    assert all(map(same_bits, model.parameters(), before))


def test_a_grad_that_came_alive_or_went(pairs):
    for model, _ in pairs:
        model[0].bias.requires_grad_(False)
        model[0].bias.grad = None
    assert_same(pairs)
    for model, _ in pairs:
        model[0].bias.requires_grad_(True)
    assert_same(pairs)


def test_another_backend_may_take_over(pairs):
    _model, _optimizer = pairs[0]
    with mpkernels.backend("reference"):
        step_both(pairs[:1], 1)
    step_both(pairs[1:], 1)
    assert_same(pairs)


def test_a_refused_step_is_refused_again():
    """What it had found out so far must not be taken for the truth by the next one."""
    model = network()
    optimizer = AdamW(model.parameters(), state_dtype=torch.int8)
    backward(model, 0)
    optimizer.step()
    weight = model[0].weight
    optimizer.state[weight]["scales"] = optimizer.state[weight]["scales"][:1]
    for _ in range(2):
        with pytest.raises(ValueError, match="scales\\[0\\] must be 6 adjacent fp32"):
            optimizer.step()


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_amsgrad_may_end(backend):
    """The scales of the moment that is no longer used stay where they are."""
    with mpkernels.backend(backend):
        model, plain = network(), network()
        optimizer = AdamW(model.parameters(), amsgrad=True, state_dtype=torch.int8)
        reference = AdamW(plain.parameters(), state_dtype=torch.int8)
        optimizer.param_groups[0]["amsgrad"] = True
        for seed in range(3):
            for each, its_optimizer in ((model, optimizer), (plain, reference)):
                backward(each, seed)
                its_optimizer.step()
            optimizer.param_groups[0]["amsgrad"] = False
        assert all(map(same_bits, model.parameters(), plain.parameters()))


def test_lazy_clones_keep_their_values():
    model = network()
    optimizer = AdamW(model.parameters(), lr=0.1)
    backward(model, 0)
    optimizer.step()
    clones = [torch._lazy_clone(it.detach()) for it in (model[0].weight, optimizer.state[model[0].weight]["exp_avg"])]
    values = [clone.tolist() for clone in clones]
    backward(model, 1)
    optimizer.step()
    assert [clone.tolist() for clone in clones] == values


def test_something_else_in_the_state():
    model = network()
    optimizer = AdamW(model.parameters())
    optimizer.state["note"] = 3
    for seed in range(2):
        backward(model, seed)
        optimizer.step()
    assert optimizer.state["note"] == 3


def test_plans_may_die_while_torch_traces():
    model = network()
    optimizer = AdamW(model.parameters())
    backward(model, 0)
    optimizer.step()
    with torch._subclasses.FakeTensorMode():
        del optimizer
        gc.collect()
