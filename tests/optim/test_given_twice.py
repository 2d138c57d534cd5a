"""Stepping a parameter twice in one step is refused before the parameter moves."""

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from mpkernels.optim import AdamW
from tests.hard_grads import same_bits
from tests.networks import B16

OPTIONS = [{"guard": False, **it} for it in ({}, {"master": "fp32"}, {"state_dtype": torch.int8}, {"amsgrad": True})]
SECOND = r"AdamW.release_grads: params\[.\] of shape \(3, 3\) must get its grad once before each step, got a second one"


def weights(count=3, dtype=torch.float32):
    return [torch.nn.Parameter(torch.full((3, 3), 1.0 + i, dtype=dtype)) for i in range(count)]


def reentrant(weight, x):
    return checkpoint(lambda x: x @ weight, x, use_reentrant=True)


def start(dtype):
    return torch.eye(3, dtype=dtype, requires_grad=True)


def shared_in_a_row(shared, other, x):
    return reentrant(shared, reentrant(other, reentrant(shared, x)))


def shared_side_by_side(shared, other, x):
    return reentrant(shared, x) + reentrant(shared, reentrant(other, x))


def shared_in_a_nested_one(shared, other, x):
    return checkpoint(lambda x: reentrant(shared, reentrant(shared, x)), x @ other, use_reentrant=True)


def tied(shared, other, x):
    return reentrant(shared.t(), reentrant(other, reentrant(shared, x)))


def inside_and_outside(shared, other, x):
    """The grad from the outer graph comes after the one from the checkpoint."""
    return reentrant(shared, x @ shared)


USES = [shared_in_a_row, shared_side_by_side, tied, shared_in_a_nested_one, inside_and_outside]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")  # the inner checkpoint has no graph
@pytest.mark.parametrize("use", USES, ids=lambda it: it.__name__)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, B16], ids=str)
def test_a_parameter_that_reentrant_checkpoints_share_is_refused_before_it_moves(use, options, dtype):
    params = weights(2, dtype)
    optimizer = AdamW(params, **options)
    optimizer.release_grads()
    before = copy.deepcopy(params)
    with pytest.raises(RuntimeError, match=SECOND):
        use(*params, start(dtype)).sum().backward()
    assert all(map(same_bits, params, before))
    assert not optimizer.state


def test_a_parameter_stepped_before_a_checkpoint_uses_it_is_refused_too():
    """The parameter has moved once by then: nothing tells beforehand what a reentrant checkpoint will use."""
    params = weights(2)
    optimizer = AdamW(params)
    optimizer.release_grads()
    with pytest.raises(RuntimeError, match=SECOND):
        (reentrant(params[0], start(torch.float32)) @ params[0]).sum().backward()
    assert optimizer.state[params[0]]["step"] == 1


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
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_parameters_that_get_one_grad_step_as_without_release(use, options):
    ours, plain = weights(), weights()
    optimizers = AdamW(ours, **options), AdamW(plain, **options)
    release = optimizers[0].release_grads()
    for _ in range(3):
        for params, optimizer in zip((ours, plain), optimizers, strict=True):
            if params is ours:
                with release.accumulate():
                    use(*params).sum().backward()
            else:
                use(*params).sum().backward()
            use(*params).sum().backward()
            optimizer.step()
            assert params is plain or all(param.grad is None for param in params)
            optimizer.zero_grad()
    assert all(map(same_bits, ours, plain))


def test_only_grads_from_reentrant_checkpoints_wait_for_the_step():
    params = weights()
    optimizer = AdamW(params)
    optimizer.release_grads()
    once_each(*params).sum().backward()
    assert [param.grad is None for param in params] == [False, True, False]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_second_grad_before_the_step_is_refused(options):
    """torch would add up the grads. A second backward may bring other parameters' grads."""
    params = weights(2)
    optimizer = AdamW(params, **options)
    optimizer.release_grads()
    params[0].sum().backward()
    params[1].sum().backward()
    before = copy.deepcopy(params)
    with pytest.raises(RuntimeError, match=SECOND):
        (params[0].sum() * params[1].sum()).backward()
    assert all(map(same_bits, params, before))
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
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_zero_grad_gives_up_a_backward_that_failed(options, set_to_none):
    params = weights(2)
    optimizer = AdamW(params, **options)
    optimizer.release_grads()
    for steps in range(1, 4):
        with pytest.raises(torch.OutOfMemoryError):
            (Fails.apply(start(torch.float32) @ params[0]) @ params[1]).sum().backward()
        assert optimizer.state[params[1]]["step"] == 2 * steps - 1
        optimizer.zero_grad(set_to_none)
        (params[0] @ params[1]).sum().backward()
        assert [optimizer.state[param]["step"] for param in params] == [steps, 2 * steps]
        optimizer.step()


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("use", USES, ids=lambda it: it.__name__)
def test_zero_grad_gives_up_a_backward_that_was_refused(use):
    params = weights(2)
    optimizer = AdamW(params)
    optimizer.release_grads()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=rf"{SECOND}.*call the optimizer's zero_grad\(\) or step\(\)"):
            use(*params, start(torch.float32)).sum().backward()
        optimizer.zero_grad()
    (params[0] @ params[1]).sum().backward()
    assert [optimizer.state[param]["step"] for param in params] == [1, 1]


def test_a_grad_that_waits_for_the_step_may_come_twice():
    """With the guard, max_norm or a scaler nothing is stepped in the backward."""
    params = weights(2)
    optimizer = AdamW(params, max_norm=1e9)
    optimizer.release_grads()
    shared_in_a_row(*params, start(torch.float32)).sum().backward()
    optimizer.step()
    assert [optimizer.state[param]["step"] for param in params] == [1, 1]


GIVEN_TWICE = r"AdamW: params\[2\] of shape \(3, 3\) must be given once, got it as params\[0\], too"


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("foreach", [None, False, True])
def test_a_parameter_twice_in_a_group_is_refused_at_the_step(named, foreach):
    """torch warns of it in the constructor."""
    first, second = weights(2)
    twice = [first, second, first]
    given = [(str(i), it) for i, it in enumerate(twice)] if named else twice
    with pytest.warns(UserWarning, match="a parameter group with duplicate parameters"):
        optimizer = AdamW(given, foreach=foreach)
    first.grad = torch.ones_like(first)
    before = copy.deepcopy([first, second])
    for _ in range(2):
        with pytest.raises(ValueError, match=GIVEN_TWICE):
            optimizer.step()
    assert all(map(same_bits, [first, second], before))


def in_its_group(optimizer, first):
    optimizer.param_groups[0]["params"].append(first)


def in_another_group(optimizer, first):
    optimizer.param_groups.append({**optimizer.param_groups[0], "params": [first]})


@pytest.mark.parametrize("put", [in_its_group, in_another_group], ids=lambda it: it.__name__)
def test_a_parameter_that_users_append_a_second_time_is_refused(put):
    params = weights(2)
    optimizer = AdamW(params)
    for _ in range(2):
        for param in params:
            param.grad = torch.ones_like(param)
        before = copy.deepcopy(params)
        if len(optimizer.state) == 0:
            optimizer.step()
            before = copy.deepcopy(params)
            put(optimizer, params[0])
        with pytest.raises(ValueError, match=GIVEN_TWICE):
            optimizer.step()
        assert all(map(same_bits, params, before))
    with pytest.raises(ValueError, match=GIVEN_TWICE):
        optimizer.release_grads()


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_a_checkpoint_that_has_a_parameter_twice_is_refused():
    first, second = weights(2)
    for param in (first, second):
        param.grad = torch.ones_like(param)
    theirs = torch.optim.AdamW([first, second, first])
    theirs.step()
    optimizer = AdamW(weights(3))
    with pytest.raises(ValueError, match=r"AdamW.load_state_dict: a group must hold each parameter once, got \[2\]"):
        optimizer.load_state_dict(theirs.state_dict())
    assert not optimizer.state
