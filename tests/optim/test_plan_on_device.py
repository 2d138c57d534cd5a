"""A plan's data on the device, and its counts of rows' blocks, serve that plan's steps alone."""

import pytest
import torch

from mpkernels.optim import AdamW
from tests.hard_grads import same_bits
from tests.optim.test_plan import made, put_grads
from tests.targets import TARGETS, emulated_variable

CHUNKS = (20_000, 5, 9_000)  # of several chunks, whose blocks hand their shares to the last one


def weights_of(params):
    return torch.cat([param.detach().double().flatten() for param in params])


def by_new_plans(steps, **options):
    """Return the weights after steps(params, optimizer), each by a plan of its own."""
    params, optimizer = made(**options)
    step = optimizer.step

    def afresh():
        optimizer._start_afresh()
        step()

    optimizer.step = afresh
    steps(params, optimizer)
    return weights_of(params)


@pytest.mark.each_value_once
@pytest.mark.parametrize("guard", [{"max_norm": 1.0}, {}], ids=str)
def test_a_skipped_step_leaves_the_next_one_whole(target, guard):
    """Each kernel counts a row's blocks, to know the last."""

    def steps(params, optimizer):
        for seed in range(5):
            put_grads(params, seed)
            if seed in (1, 2) and guard:
                params[seed].grad[3] = float("inf")
            optimizer.step()

    params, optimizer = made(sizes=CHUNKS, device=target.device, **guard)
    steps(params, optimizer)
    assert same_bits(weights_of(params), by_new_plans(steps, sizes=CHUNKS, device=target.device, **guard))
    assert {int(state["step"]) for state in optimizer.state.values()} == {3 if guard else 5}


def in_groups(count, device="cpu"):
    params = [torch.nn.Parameter(torch.full((1 + i % 3,), 1.0 + i, device=device)) for i in range(2 * count)]
    groups = [
        {"params": params[i::count], "lr": 0.1 / (1 + i), "betas": (0.9 - i / 200, 0.99), "maximize": i % 2 > 0}
        for i in range(count)
    ]
    return params, AdamW(groups, max_norm=1.0)


@pytest.mark.parametrize("count", [1, 17, 61, 130])
def test_each_parameter_steps_by_its_own_group(emulated, count):
    """Also for parameters of a later launch than the first."""
    params, optimizer = in_groups(count)
    for seed in range(3):
        put_grads(params, seed)
        optimizer.step()
    with_reference = in_groups(count)
    for seed in range(3):
        put_grads(with_reference[0], seed)
        with TARGETS["cpu-reference"].active():
            with_reference[1].step()
    assert torch.equal(optimizer.grad_norm, with_reference[1].grad_norm)
    assert same_bits(weights_of(params), weights_of(with_reference[0]))


@pytest.mark.parametrize("count", [17, 61, 130])
def test_a_skipped_step_counts_once_however_many_launches_it_takes(emulated, count):
    params, optimizer = in_groups(count)
    put_grads(params, 0)
    params[count].grad[0] = torch.inf
    optimizer.step()
    assert optimizer.skipped_steps.item() == 1
    assert optimizer.step_was_skipped
    params[count].grad[0] = 1.0
    optimizer.step()
    assert optimizer.skipped_steps.item() == 1
    assert not optimizer.step_was_skipped


@pytest.mark.parametrize("call", range(1, 6))
def test_a_step_that_failed_midway_leaves_the_next_one_whole(emulated, call):
    """Of five launches: one that takes rows to the device, two that look at grads, two that step. What was launched
    before the failed one is done, as on a GPU; but its count of blocks doesn't go on in the next step."""
    params, optimizer = in_groups(61)
    put_grads(params, 0)
    failure = emulated_variable("emulation_calls_to_failure")
    failure.value = call
    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step()
    steps = {float(state["step"]) for state in optimizer.state.values()}
    assert steps == ({0.0, 1.0} if call == 5 else {0.0})
    before = [param.detach().clone() for param in params]
    optimizer.step()
    assert torch.equal(
        optimizer.grad_norm, torch.cat([it.grad for it in params]).double().square().sum().sqrt().float()
    )
    assert {float(state["step"]) for state in optimizer.state.values()} == {it + 1 for it in steps}
    assert not any(map(torch.equal, params, before))
