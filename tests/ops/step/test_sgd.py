"""SGD's rule beside torch's, where momentum comes and goes."""

import pytest
import torch

from mpkernels.optim import SGD
from tests.networks import assert_close, backward, network


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.int8], ids=str)
def test_momentum_may_be_switched_on_and_off(state_dtype):
    """As in torch, the buffer begins with the first grad that comes while momentum is on."""
    ours, theirs = network(), network()
    optimizers = [SGD(ours.parameters(), 0.01, state_dtype=state_dtype), torch.optim.SGD(theirs.parameters(), 0.01)]
    for seed, momentum in enumerate([0, 0, 0.9, 0.9, 0, 0.9]):
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.param_groups[0]["momentum"] = momentum
            backward(model, seed)
            optimizer.step()
    rtol = 1e-5 if state_dtype == torch.float32 else 2e-2
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=rtol)


def test_groups_with_and_without_momentum_step_as_torchs():
    ours, theirs = network(), network()
    optimizers = []
    for model, kind in ((ours, SGD), (theirs, torch.optim.SGD)):
        first, *rest = model.parameters()
        optimizers.append(kind([{"params": [first], "momentum": 0.9}, {"params": rest, "weight_decay": 0.1}], lr=0.01))
    for seed in range(6):
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            backward(model, seed)
            optimizer.step()
    assert_close(ours, theirs, 60, 0.01)
    assert [len(optimizers[0].state.get(it, {})) for it in ours.parameters()] == [2, 0, 0, 0, 0, 0]


def test_a_skipped_first_step_saves_no_momentum_buffer():
    """No buffer is saved, so that torch's begins with the next grad, as ours does."""
    model = network()
    optimizer = SGD(model.parameters(), 0.01, momentum=0.9, dampening=0.5, guard=True)
    backward(model, 0)
    model[0].weight.grad[0, 0] = float("nan")
    optimizer.step()
    assert all(state == {} for state in optimizer.state_dict()["state"].values())
