"""What changes between steps: a plan that is kept does what one does that is made anew."""

import pytest
import torch
from torch.nn import Parameter

from mpkernels.optim import AdamW
from tests.cases import same_bits
from tests.optim.test_plan import made, put_grads


def other_moment(params, optimizer):
    optimizer.state[params[1]]["exp_avg"] = torch.full_like(params[1], 2)


def other_memory(params, optimizer):
    optimizer.state[params[1]]["exp_avg"].data = torch.full_like(params[1], 2)


def other_param_memory(params, optimizer):
    params[1].data = params[1].data + 1


def one_that_comes_later(params, optimizer):
    later = Parameter(torch.ones(3))
    later.grad = torch.ones(3)
    optimizer.add_param_group({"params": [later]})
    params.append(later)


def others_changed_places(params, optimizer):
    optimizer.param_groups[0]["params"].reverse()


def frozen(params, optimizer):
    params[0].grad = None


def one_without_a_grad_comes_first(params, optimizer):
    optimizer.param_groups[0]["params"].insert(0, Parameter(torch.ones(2)))


def a_new_one_in_its_place(params, optimizer):
    old, params[1] = params[1], Parameter(params[1].detach().clone())
    params[1].grad = old.grad
    optimizer.param_groups[0]["params"][1] = params[1]


def forgotten_states(params, optimizer):
    optimizer.state.clear()


def amsgrad_off_and_on(params, optimizer):
    optimizer.param_groups[0]["amsgrad"] = True
    for param in params:
        optimizer.state[param]["max_exp_avg_sq"] = torch.full_like(param, 3)


def grads_of_another_dtype(params, optimizer):
    params[1].grad, params[1].grad_dtype = None, None
    params[1].grad = torch.full(params[1].shape, 0.5, dtype=torch.bfloat16)


def a_zero_tensor(params, optimizer):
    params[1].grad = torch._efficientzerotensor(params[1].shape, device=params[1].device)


def a_longer_one(params, optimizer):
    """So that those after it lie in other chunks."""
    param, size = params[0], 20_000
    param.grad, param.data = None, torch.ones(size)
    for name in ("exp_avg", "exp_avg_sq"):
        optimizer.state[param][name].data = torch.ones(size)
    param.grad = torch.ones(size)


CHANGES = [
    a_longer_one,
    grads_of_another_dtype,
    a_zero_tensor,
    other_moment,
    other_memory,
    other_param_memory,
    one_that_comes_later,
    others_changed_places,
    frozen,
    one_without_a_grad_comes_first,
    a_new_one_in_its_place,
    forgotten_states,
    amsgrad_off_and_on,
]


@pytest.mark.each_value_once
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(change, target):
    with target.device:  # where the changes make their tensors
        assert_seen(change, target.device)


def assert_seen(change, device):
    weights = []
    for is_kept in (True, False):
        params, optimizer = made(sizes=(4, 6, 2), device=device)
        for seed in range(6):
            put_grads(params, seed)
            if seed in (2, 4):
                change(params, optimizer)
            if not is_kept:
                optimizer._start_afresh()
            optimizer.step()
        weights.append(torch.cat([param.detach() for param in params]))
    assert same_bits(*weights)


@pytest.mark.parametrize("place", [0, 299])
def test_a_change_is_seen_among_many(place):
    weights = []
    for moves in (True, False):
        params, optimizer = made(sizes=(2,) * 300)
        for seed in range(3):
            put_grads(params, seed)
            optimizer.step()
        moment = optimizer.state[params[place]]["exp_avg"]
        if moves:
            moment.data = torch.full_like(moment, 2)
        else:
            moment.fill_(2)
        put_grads(params, 3)
        optimizer.step()
        weights.append(torch.cat([param.detach() for param in params]))
    assert same_bits(*weights)


@pytest.mark.parametrize("place", [0, 1])
def test_a_negated_parameter_is_refused(place):
    params, optimizer = made(sizes=(4, 6))
    for seed in range(3):
        put_grads(params, seed)
        if seed == 2:
            params[place].data = torch._neg_view(params[place].data)
            with pytest.raises(RuntimeError, match="negation"):
                optimizer.step()
        else:
            optimizer.step()
    assert optimizer.state[params[0]]["step"] == 2


def test_a_grad_resized_in_place_is_refused():
    params, optimizer = made(sizes=(4, 6))
    for seed in range(3):
        put_grads(params, seed)
        if seed < 2:
            optimizer.step()
    params[1].grad.resize_(3)
    with pytest.raises(ValueError, match="must have the parameter's shape"):
        optimizer.step()


def test_groups_exchange_parameters_where_some_have_no_grad():
    weights = []
    for is_kept in (True, False):
        a, n, m, d = (Parameter(torch.full((3,), 2.0)) for _ in range(4))
        optimizer = AdamW([{"params": [a, n]}, {"params": [m, d], "lr": 0.5}], lr=0.1)
        for seed in range(5):
            put_grads([a, d], seed)
            if seed == 3:
                for group, its in zip(optimizer.param_groups, ([n, m], [a, d]), strict=True):
                    group["params"][:] = its
            if not is_kept:
                optimizer._start_afresh()
            optimizer.step()
        weights.append(torch.cat([a.detach(), d.detach()]))
    assert same_bits(*weights)
