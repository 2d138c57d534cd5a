"""What changes between steps that go by a glance: then a step does what it does by lists."""

import pytest
import torch
from torch.nn import Parameter

from mpkernels import _glance
from mpkernels.optim import AdamW
from tests.cases import same_bits
from tests.optim.test_glance import made, needs_a_glance, put_grads


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
    params[1].grad = torch._efficientzerotensor(params[1].shape)


CHANGES = [
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


@needs_a_glance
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(change, monkeypatch):
    """Before the grads come, and after."""
    weights = []
    for sees in (True, False):
        with monkeypatch.context() as patch:
            if not sees:
                patch.setattr(_glance, "can_see", lambda: False)
            params, optimizer = made(sizes=(4, 6, 2))
            for seed in range(6):
                put_grads(params, seed)
                if seed in (2, 4):
                    change(params, optimizer)
                optimizer.step()
            weights.append(torch.cat([param.detach() for param in params]))
    assert same_bits(*weights)


@needs_a_glance
@pytest.mark.parametrize("place", [0, 299])
def test_a_change_is_seen_among_many(place):
    """Which several threads look at."""
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


@needs_a_glance
@pytest.mark.parametrize("place", [0, 1])
def test_a_negated_parameter_is_refused_as_by_lists(place):
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


@needs_a_glance
def test_a_grad_resized_in_place_is_refused():
    params, optimizer = made(sizes=(4, 6))
    for seed in range(3):
        put_grads(params, seed)
        if seed < 2:
            optimizer.step()
    params[1].grad.resize_(3)
    with pytest.raises(ValueError, match="must have the parameter's shape"):
        optimizer.step()


@needs_a_glance
def test_groups_exchange_parameters_where_some_have_no_grad(monkeypatch):
    weights = []
    for sees in (True, False):
        with monkeypatch.context() as patch:
            if not sees:
                patch.setattr(_glance, "can_see", lambda: False)
            a, n, m, d = (Parameter(torch.full((3,), 2.0)) for _ in range(4))
            optimizer = AdamW([{"params": [a, n]}, {"params": [m, d], "lr": 0.5}], lr=0.1)
            for seed in range(5):
                put_grads([a, d], seed)
                if seed == 3:
                    for group, its in zip(optimizer.param_groups, ([n, m], [a, d]), strict=True):
                        group["params"][:] = its
                optimizer.step()
            weights.append(torch.cat([a.detach(), d.detach()]))
    assert same_bits(*weights)


def test_neighbours_at_other_steps(target):
    """Whose powers of the betas are their own."""
    weights = []
    for apart in (True, False):
        params, optimizer = made(sizes=(4, 6, 2), device=target.device)
        optimizers = [AdamW([param], lr=0.1) for param in params] if apart else [optimizer]
        for seed in range(5):
            put_grads(params, seed)
            if seed in (1, 2):
                params[1].grad = None
            for each in optimizers:
                each.step()
        weights.append(torch.cat([param.detach() for param in params]))
    assert same_bits(*weights)


def test_autograd_is_told_of_each_parameter(target):
    params, optimizer = made(sizes=(4, 6), device=target.device)
    for seed in range(3):
        put_grads(params, seed)
        before = [param._version for param in params]
        optimizer.step()
        assert all(param._version > version for param, version in zip(params, before, strict=True))


def test_a_table_made_within_a_transform_outlives_it():
    params, optimizer = made(sizes=(4, 6))
    put_grads(params, 0)

    def stepping(x):
        optimizer.step()
        return x.sum()

    torch.func.grad(stepping)(torch.ones(2))
    optimizer.step()
    optimizer.step()
    assert optimizer.state[params[0]]["step"] == 3


def test_a_grad_without_memory_is_not_seen():
    param = Parameter(torch.ones(6))
    param.grad = torch._efficientzerotensor((6,))
    seen = torch.empty(_glance.WORDS, dtype=torch.int64)
    assert not (_glance.can_see() and _glance.at([param], [param], [param], [None], seen))


def test_a_plan_is_forgotten_within_a_transform():
    """Garbage is collected at any time; what a finalizer raises, pytest tells."""
    params, optimizer = made(sizes=(4, 6))
    put_grads(params, 0)
    optimizer.step()
    (table,) = optimizer._tables
    handle = table._handle
    del table

    def collecting(x):
        optimizer._start_afresh()
        return x + 1

    assert handle.item() != 0
    torch.func.functionalize(collecting)(torch.ones(2))
    assert handle.item() == 0
