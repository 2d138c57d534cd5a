"""Grads that are conjugated or negated views of their memory, as autograd makes them, count with their values."""

import math

import pytest
import torch

from mpkernels.amp import GradScaler, clip_grad_norm_
from mpkernels.optim import SGD
from tests.networks import B16, CPU
from tests.optim.optimizers import each_optimizer


def _numbers(device, bad, dtype=torch.complex64):
    numbers = torch.randn(3, 4, dtype=dtype, generator=torch.Generator().manual_seed(0))
    if bad:
        numbers[0, 0] = complex(math.inf, math.inf) if dtype.is_complex else math.inf
    return numbers.to(device)


def conjugated(value):
    return value.conj().resolve_conj().conj()


VIEWS = {
    "conjugated": lambda device, bad: conjugated(_numbers(device, bad)),
    "conjugated and negated": lambda device, bad: torch._neg_view(-conjugated(_numbers(device, bad))),
    "complex and negated": lambda device, bad: torch._neg_view(-_numbers(device, bad)),
    "imaginary parts": lambda device, bad: _numbers(device, bad).conj().imag,
    "imaginary parts in fp64": lambda device, bad: _numbers(device, bad, torch.complex128).conj().imag,
    "16 bits, negated": lambda device, bad: torch._neg_view(-_numbers(device, bad, torch.float32).to(B16)),
}
each_view = pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)


def pairs(view, line=None, device=CPU, bad=False, **options):
    """Return a parameter with the view for its grad and one with a plain grad, with an optimizer each."""
    found = []
    for grad in (view(device, bad), view(device, bad).resolve_conj().resolve_neg().clone()):
        if grad.is_complex() and line is not None:
            line.skip_complex()
        param = torch.nn.Parameter(torch.ones_like(grad))
        param.grad = grad
        found.append((param, None if line is None else line.ours([param], **options)))
    assert found[0][0].grad.is_conj() or found[0][0].grad.is_neg()
    return found


def assert_same(found):
    (param, _), (plain, _) = found
    assert torch.equal(param, plain)
    assert torch.equal(param.grad, plain.grad)


@pytest.mark.each_value_once
@each_view
@each_optimizer
@pytest.mark.parametrize("options", [{}, {"max_norm": 0.5}], ids=str)
def test_they_are_stepped_as_plain_grads(target, view, line, options):
    found = pairs(view, line, target.device, **options)
    for _, optimizer in found * 2:
        optimizer.step()
    assert_same(found)
    assert not torch.equal(found[0][0], torch.ones_like(found[0][0]))


def test_the_grad_of_a_product_with_an_adjoint_steps_as_torchs_does():
    weight, x = torch.ones(3, 3, dtype=torch.complex64), torch.randn(3, 2, dtype=torch.complex64)
    ours, theirs = (torch.nn.Parameter(weight.clone()) for _ in range(2))
    for param, kind in ((ours, SGD), (theirs, torch.optim.SGD)):
        (param.mH @ x).abs().square().sum().backward()
        assert param.grad.is_conj()
        kind([param], lr=0.1).step()
    torch.testing.assert_close(ours, theirs)


@pytest.mark.each_value_once
@each_view
@each_optimizer
@pytest.mark.parametrize("bad", [False, True])
def test_a_scaler_unscales_and_clips_them(target, view, line, bad):
    found = pairs(view, line, target.device, bad)
    for param, optimizer in found:
        scaler = GradScaler(target.device.type, init_scale=4.0)
        scaler.scale(torch.ones(()))
        before = param.grad.clone()
        scaler.unscale_(optimizer)
        assert bad or torch.equal(param.grad, before / 4)
        clip_grad_norm_([param], 0.5)
        assert bad or math.isclose(param.grad.norm(), 0.5, rel_tol=0.01)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.step_was_skipped == bad
        assert not bad or "inf" in str(scaler.overflow_report())
    assert_same(found)


@each_view
@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
def test_clip_grad_norm_clips_them(view, norm_type):
    found = pairs(view)
    norms = [clip_grad_norm_([param], 0.5, norm_type) for param, _ in found]
    assert_same(found)
    assert torch.equal(*norms)
    assert math.isclose(torch.linalg.vector_norm(found[0][0].grad, norm_type), 0.5, rel_tol=0.01)
