"""What a glance at a row must not miss: a parameter or a grad that differs from last time where its memory begins as
it did."""

import pytest
import torch

from mpkernels.optim import AdamW
from tests.cases import same_bits

SHAPE = (4, 4)


def stepped(device):
    generator = torch.Generator().manual_seed(0)
    value, *grads = (torch.randn(SHAPE, generator=generator).to(device) for _ in range(3))
    param = torch.nn.Parameter(value.clone())
    optimizer = AdamW([param], lr=0.1)
    param.grad = grads[0]
    optimizer.step()
    return param, optimizer, grads[1]


def weights_after(change, target, afresh):
    """``change`` gets the parameter and its next grad; ``afresh``: by an optimizer that remembers no table."""
    param, optimizer, grad = stepped(target.device)
    change(param, grad)
    if afresh:
        optimizer._start_afresh()
    optimizer.step()
    return param.detach().clone()


def transpose_parameter(param, grad):
    param.data, param.grad = param.data.t(), grad


def transpose_grad(param, grad):
    param.grad.copy_(grad)
    param.grad = param.grad.t()


@pytest.mark.parametrize("change", [transpose_parameter, transpose_grad])
def test_other_strides_at_the_same_place(target, change):
    def clone_of_it(param, grad):
        change(param, grad)
        param.data, param.grad = (it.clone(memory_format=torch.contiguous_format) for it in (param.data, param.grad))

    got, want = weights_after(change, target, False), weights_after(clone_of_it, target, True)
    assert same_bits(got, want)


def test_another_dtype_at_the_same_place(target):
    """Of the second parameter; its grads have fp32 before and after."""
    results = []
    for afresh in (False, True):
        first, param = (torch.nn.Parameter(torch.ones(SHAPE, dtype=torch.float16, device=target.device)) for _ in "12")
        param.grad_dtype = torch.float32
        first.grad = torch.ones_like(first)
        optimizer = AdamW([first, param], lr=0.1)
        for dtype in (torch.float16, torch.bfloat16):
            param.grad = None
            param.data = param.data.view(dtype)
            param.grad = torch.full(SHAPE, 0.5, device=target.device)
            if afresh:
                optimizer._start_afresh()
            optimizer.step()
        results.append(param.detach().clone())
    assert same_bits(*results)


def test_fewer_elements_at_the_same_place_are_refused(target):
    """The states have more, and beyond these may lie another's memory."""
    param, optimizer, _ = stepped(target.device)
    before = param.detach().flatten().tolist()
    param.grad, param.data = None, param.data[:2]
    param.grad = torch.ones_like(param)
    with pytest.raises((RuntimeError, ValueError)):
        optimizer.step()
    assert param.flatten().tolist() == before[:8]


def other_strides(moment):
    moment.set_(moment.untyped_storage(), 0, SHAPE, (1, SHAPE[0]))


def another_dtype(moment):
    moment.data = moment.flatten().view(torch.bfloat16)[: moment.numel()].view(SHAPE)


@pytest.mark.parametrize("change", [other_strides, another_dtype])
def test_moments_that_are_read_otherwise_at_the_same_place(change, target):
    weights = []
    for afresh in (False, True):
        param, optimizer, grad = stepped(target.device)
        for name in ("exp_avg", "exp_avg_sq"):
            change(optimizer.state[param][name])
        param.grad = grad
        if afresh:
            optimizer._start_afresh()
        optimizer.step()
        weights.append(param.detach().clone())
    assert same_bits(*weights)


def test_states_that_two_parameters_have_exchanged(target):
    """In the order that the optimizer had them in."""
    weights = []
    for afresh in (False, True):
        params = [torch.nn.Parameter(torch.full(SHAPE, 2.0, device=target.device)) for _ in range(2)]
        optimizer = AdamW(params, lr=0.1)
        for i in range(3):
            for param, size in zip(params, (1.0, -3.0), strict=True):
                param.grad = torch.full_like(param, size)
            if i == 2:
                states = [optimizer.state[param] for param in params]
                optimizer.state.clear()
                optimizer.state.update(zip(reversed(params), states, strict=True))
                if afresh:
                    optimizer._start_afresh()
            optimizer.step()
        weights.append(torch.stack([param.detach() for param in params]))
    assert same_bits(*weights)


def test_a_step_that_was_refused_tells_no_norm(target):
    param, optimizer, grad = stepped(target.device)
    optimizer.max_norm = 1.0
    param.grad = grad
    optimizer.step()
    before = optimizer.grad_norm.item()
    optimizer.state[param]["exp_avg"].data = torch.ones(3, device=target.device)
    with pytest.raises((RuntimeError, ValueError)):
        optimizer.step()
    assert optimizer.grad_norm.item() == before
