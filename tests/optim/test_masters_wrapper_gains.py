"""Masters reports overflows, knows its norm under a scaler, and frees grads in the backward, as others of ours do."""

import math
from operator import attrgetter

import pytest
import torch

from mpkernels.amp import GradScaler
from mpkernels.optim import Masters
from tests.hard_grads import same_bits
from tests.networks import B16, F16, backward, network
from tests.optim.test_masters_wrapper_memory import CountingSteps
from tests.optim.test_masters_wrapper_use import around
from tests.optim.wrapped import OPTIMIZERS, all_params, give_grads


def bad_step(optimizer, scale=1.0):
    give_grads(all_params(optimizer), 0, B16, scale)
    all_params(optimizer)[1].grad[2, 3] = math.nan
    optimizer.step()


def test_a_skipped_step_is_reported_with_the_place_of_what_overflowed():
    optimizer = around(momentum=0.9)
    assert not optimizer.overflow_report()
    bad_step(optimizer)
    [culprit] = optimizer.overflow_report().culprits
    assert (culprit.name, culprit.nans, culprit.first) == ("group 0, parameter 1", 1, (2, 3))


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, GradScaler], ids=lambda it: it.__module__)
def test_under_a_scaler_the_step_reports_what_overflowed(kind):
    optimizer, scaler = around(), kind("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    give_grads(all_params(optimizer), 0, B16, 4.0)
    all_params(optimizer)[0].grad[5, 1] = math.inf
    scaler.step(optimizer)
    scaler.update()
    for teller in [optimizer, scaler] if kind is GradScaler else [optimizer]:
        report = teller.overflow_report()
        [culprit] = report.culprits
        assert (culprit.name, culprit.first, report.scale) == ("group 0, parameter 0", (5, 1), 4.0)


@pytest.mark.parametrize("dtype", [torch.float32, B16, F16], ids=str)
def test_our_scaler_leaves_the_look_to_the_step_which_knows_the_norm(dtype):
    optimizer, scaler = around(dtype=dtype), GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    give_grads(all_params(optimizer), 0, dtype)
    norm = torch.cat([it.grad.double().flatten() for it in all_params(optimizer)]).norm()
    give_grads(all_params(optimizer), 0, dtype, 4.0)
    scaler.step(optimizer)
    torch.testing.assert_close(optimizer.grad_norm.double(), norm, rtol=1e-6, atol=0)


IS_TRAINED = attrgetter("requires_grad")
RELEASED = {name: make for name, make in OPTIMIZERS.items() if "counts in groups" not in name}


@pytest.mark.parametrize("make", RELEASED.values(), ids=RELEASED)
@pytest.mark.parametrize("dtype", [torch.float32, B16], ids=str)
def test_grads_are_freed_in_the_backward_and_weights_step_as_without(make, dtype):
    models = network(dtype), network(dtype)
    for model in models:
        for param in model.parameters():
            param.requires_grad_(param.ndim == 2)  # for Muon
    released, plain = (Masters(make(filter(IS_TRAINED, it.parameters())), guard=False) for it in models)
    release = released.release_grads()
    for step in range(3):
        for model in models:
            backward(model, step)
        assert all(it.grad is None for it in models[0].parameters())
        released.step()
        plain.step()
        plain.zero_grad()
        assert all(map(same_bits, models[0].parameters(), models[1].parameters()))
    release.remove()
    backward(models[0], 3)
    assert all(it.grad is not None for it in models[0].parameters() if it.requires_grad)


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda it: CountingSteps(it, lr=0.1), "whose step changes steps, a group's lr"),
        (OPTIMIZERS["a class that counts in groups"], "whose step changes a group's count"),
    ],
)
def test_a_class_that_counts_its_steps_is_not_stepped_in_the_backward(make, what):
    model = network(B16)
    with pytest.raises(ValueError, match=f"^Masters: optimizer must remember its steps in state alone for.*{what}"):
        Masters(make(model.parameters()), guard=False).release_grads()
    optimizer = Masters(make(model.parameters()), max_norm=1.0)  # all grads are kept until the step
    optimizer.release_grads()
    backward(model, 0)
    assert all(it.grad.dtype == B16 for it in model.parameters())
    optimizer.step()
    assert all(it.grad is None for it in model.parameters())
