"""Tensors that no longer fit a plan are refused before anything moves."""

import pytest
import torch

from tests.hard_grads import same_bits
from tests.optim.test_plan import params_and_optimizer, put_grads


def fewer_elements_at_the_same_place(params, optimizer):
    """The states have more elements; what lies beyond the parameter's may be another tensor's memory."""
    params[1].grad, params[1].data = None, params[1].data[:3]
    params[1].grad = torch.ones(3, device=params[1].device)


def a_grad_resized_in_place(params, optimizer):
    params[1].grad.resize_(3)


def a_shorter_moment(params, optimizer):
    optimizer.state[params[1]]["exp_avg"].data = torch.ones(3, device=params[1].device)


def too_few_scales(params, optimizer):
    optimizer.state[params[1]]["scales"] = optimizer.state[params[1]]["scales"][:1]


SHAPE = "must have the parameter's shape"


@pytest.mark.parametrize(
    ("change", "options", "text"),
    [
        (fewer_elements_at_the_same_place, {}, SHAPE),
        (a_grad_resized_in_place, {}, SHAPE),
        (a_shorter_moment, {}, SHAPE),
        (too_few_scales, {"state_dtype": torch.int8}, r"scales\[1\] must be 2 adjacent fp32"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_at_each_try(target, change, options, text):
    """A refused step moves nothing and reports no norm, and the next step takes over nothing that it had found out."""
    params, optimizer = params_and_optimizer(sizes=(4, 6, 2), device=target.device, max_norm=1.0, **options)
    put_grads(params, 0)
    optimizer.step()
    norm = optimizer.grad_norm.item()
    change(params, optimizer)
    before = [param.detach().clone() for param in params]
    for _ in range(2):
        with pytest.raises((ValueError, RuntimeError), match=text):
            optimizer.step()
    assert all(map(same_bits, params, before))
    assert optimizer.grad_norm.item() == norm


@pytest.mark.parametrize("place", [0, 1])
def test_a_negated_parameter_is_refused(place):
    params, optimizer = params_and_optimizer(sizes=(4, 6))
    put_grads(params, 0)
    optimizer.step()
    put_grads(params, 1)
    params[place].data = torch._neg_view(params[place].data)
    with pytest.raises(RuntimeError, match="negation"):
        optimizer.step()
    assert optimizer.state[params[0]]["step"] == 1
