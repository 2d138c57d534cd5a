"""Stepping a parameter twice in one step is refused before the parameter moves."""

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.networks import B16
from tests.optim.optimizers import Tuned, all_same_bits

each_option = pytest.mark.parametrize(
    "options", [{}, {"master": "fp32"}, {"state_dtype": torch.int8}, {"amsgrad": True}], ids=str
)
SECOND = r"Tuned.release_grads: params\[.\] of shape \(3, 3\) must get its grad once before each step, got a second one"
GIVEN_TWICE = r"Tuned: params\[2\] of shape \(3, 3\) must be given once, got it as params\[0\], too"


def weights(count=3, dtype=torch.float32):
    return [torch.nn.Parameter(torch.full((3, 3), 1.0 + i, dtype=dtype)) for i in range(count)]


def released(count=2, dtype=torch.float32, **options):
    params = weights(count, dtype)
    (optimizer := Tuned(params, **{"guard": False, **options})).release_grads()
    return params, optimizer


def steps_of(optimizer):
    return [int(state["step"]) for state in map(optimizer.state.get, optimizer.param_groups[0]["params"]) if state]


def reentrant(weight, x):
    return checkpoint(lambda x: x @ weight, x, use_reentrant=True)


def start(dtype=torch.float32):
    return torch.eye(3, dtype=dtype, requires_grad=True)


def in_a_nested_one(shared, other, x):
    return checkpoint(lambda x: reentrant(shared, reentrant(shared, x)), x @ other, use_reentrant=True)


SHARED = {
    "in a row": lambda shared, other, x: reentrant(shared, reentrant(other, reentrant(shared, x))),
    "side by side": lambda shared, other, x: reentrant(shared, x) + reentrant(shared, reentrant(other, x)),
    "tied": lambda shared, other, x: reentrant(shared.t(), reentrant(other, reentrant(shared, x))),
    "in a nested one": in_a_nested_one,
    # The grad from the outer graph comes after the one from the checkpoint.
    "inside and outside": lambda shared, other, x: reentrant(shared, x @ shared),
}
each_use = pytest.mark.parametrize("use", SHARED.values(), ids=SHARED)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")  # the inner checkpoint has no graph
@each_use
@each_option
@pytest.mark.parametrize("dtype", [torch.float32, B16], ids=str)
def test_a_parameter_that_reentrant_checkpoints_share_is_refused_before_it_moves(use, options, dtype):
    params, optimizer = released(dtype=dtype, **options)
    before = copy.deepcopy(params)
    for _ in range(2):  # zero_grad gives up a backward that was refused
        with pytest.raises(RuntimeError, match=rf"{SECOND}.*call the optimizer's zero_grad\(\) or step\(\)"):
            use(*params, start(dtype)).sum().backward()
        optimizer.zero_grad()
    assert all_same_bits(params, before)
    assert not optimizer.state
    (params[0] @ params[1]).sum().backward()
    assert steps_of(optimizer) == [1, 1]


def test_a_parameter_stepped_before_a_checkpoint_uses_it_is_refused_too():
    """The parameter has moved once by then: nothing tells beforehand what a reentrant checkpoint will use."""
    params, optimizer = released()
    with pytest.raises(RuntimeError, match=SECOND):
        (reentrant(params[0], start()) @ params[0]).sum().backward()
    assert steps_of(optimizer) == [1]


def once_each(first, second, third):
    return reentrant(third, reentrant(first, start(first.dtype)) @ second)


def non_reentrant(first, second, third):
    x = start(first.dtype)
    for weight in (first, second, first, third):
        x = checkpoint(lambda x, weight=weight: x @ weight, x, use_reentrant=False)
    return x


def shared_without_checkpoints(first, second, third):
    return first @ second @ first @ third


@pytest.mark.parametrize("use", [once_each, non_reentrant, shared_without_checkpoints], ids=lambda it: it.__name__)
@each_option
def test_parameters_that_get_one_grad_step_as_without_release(use, options):
    ours, plain = weights(), weights()
    optimizers = [Tuned(it, guard=False, **options) for it in (ours, plain)]
    release = optimizers[0].release_grads()
    for _ in range(3):
        with release.accumulate():
            use(*ours).sum().backward()
        use(*plain).sum().backward()
        for params, optimizer in zip((ours, plain), optimizers, strict=True):
            use(*params).sum().backward()
            optimizer.step()
            assert params is plain or all(param.grad is None for param in params)
            optimizer.zero_grad()
    assert all_same_bits(ours, plain)


def test_only_grads_from_reentrant_checkpoints_wait_for_the_step():
    params, _ = released(3)
    once_each(*params).sum().backward()
    assert [param.grad is None for param in params] == [False, True, False]


@each_option
def test_a_second_grad_before_the_step_is_refused(options):
    """torch would add up the grads. A second backward may bring other parameters' grads."""
    params, optimizer = released(**options)
    params[0].sum().backward()
    params[1].sum().backward()
    before = copy.deepcopy(params)
    with pytest.raises(RuntimeError, match=SECOND):
        (params[0].sum() * params[1].sum()).backward()
    assert all_same_bits(params, before)
    optimizer.step()
    optimizer.zero_grad()
    params[0].sum().backward()
    assert optimizer.state[params[0]]["step"] == 2


class Fails(torch.autograd.Function):
    """A function whose backward runs out of memory."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise torch.OutOfMemoryError


@pytest.mark.parametrize("set_to_none", [True, False])
@each_option
def test_zero_grad_gives_up_a_backward_that_failed(options, set_to_none):
    params, optimizer = released(**options)
    for steps in range(1, 4):
        with pytest.raises(torch.OutOfMemoryError):
            (Fails.apply(start() @ params[0]) @ params[1]).sum().backward()
        assert optimizer.state[params[1]]["step"] == 2 * steps - 1
        optimizer.zero_grad(set_to_none)
        (params[0] @ params[1]).sum().backward()
        assert steps_of(optimizer) == [steps, 2 * steps]
        optimizer.step()


def test_a_grad_that_waits_for_the_step_may_come_twice():
    """With the guard, max_norm or a scaler nothing is stepped in the backward."""
    params, optimizer = released(guard=None, max_norm=1e9)
    SHARED["in a row"](*params, start()).sum().backward()
    optimizer.step()
    assert steps_of(optimizer) == [1, 1]


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("foreach", [None, False, True])
def test_a_parameter_twice_in_a_group_is_refused_at_the_step(named, foreach):
    """torch warns of it in the constructor."""
    first, second = weights(2)
    twice = [first, second, first]
    with pytest.warns(UserWarning, match="a parameter group with duplicate parameters"):
        optimizer = Tuned([(str(i), it) for i, it in enumerate(twice)] if named else twice, foreach=foreach)
    first.grad = torch.ones_like(first)
    before = copy.deepcopy([first, second])
    for _ in range(2):
        with pytest.raises(ValueError, match=GIVEN_TWICE):
            optimizer.step()
    assert all_same_bits([first, second], before)


@pytest.mark.parametrize("into_its_group", [True, False])
def test_a_parameter_that_users_append_a_second_time_is_refused(into_its_group):
    params = weights(2)
    optimizer = Tuned(params)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    if into_its_group:
        optimizer.param_groups[0]["params"].append(params[0])
    else:
        optimizer.param_groups.append({**optimizer.param_groups[0], "params": params[:1]})
    before = copy.deepcopy(params)
    for refused in (optimizer.step, optimizer.step, optimizer.release_grads):
        with pytest.raises(ValueError, match=GIVEN_TWICE):
            refused()
    assert all_same_bits(params, before)


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_a_checkpoint_that_has_a_parameter_twice_is_refused():
    first, second = weights(2)
    for param in (first, second):
        param.grad = torch.ones_like(param)
    theirs = torch.optim.AdamW([first, second, first])
    theirs.step()
    optimizer = Tuned(weights(3))
    with pytest.raises(ValueError, match=r"Tuned.load_state_dict: a group must hold each parameter once, got \[2\]"):
        optimizer.load_state_dict(theirs.state_dict())
    assert not optimizer.state
