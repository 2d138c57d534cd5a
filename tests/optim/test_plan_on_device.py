"""A plan keeps tables and counts on the device; no step, skipped or failed, leaves them wrong for the next one."""

import pytest
import torch

from mpkernels.optim import AdamW
from tests.hard_grads import same_bits
from tests.optim.test_plan import params_and_optimizer, put_grads
from tests.targets import TARGETS, emulated_variable

SIZES = (20_000, 5, 9_000)  # the long rows have several chunks, whose sums the last block adds up


def all_weights(params):
    return torch.cat([param.detach().double().flatten() for param in params])


def weights_by_new_plans(steps, **options):
    """Return the weights after steps(params, optimizer), where each step makes a new plan."""
    params, optimizer = params_and_optimizer(**options)
    step = optimizer.step

    def step_by_a_new_plan():
        optimizer._start_afresh()
        step()

    optimizer.step = step_by_a_new_plan
    steps(params, optimizer)
    return all_weights(params)


@pytest.mark.each_value_once
@pytest.mark.parametrize("guard", [{"max_norm": 1.0}, {}], ids=str)
def test_the_step_after_a_skipped_one_is_right(target, guard):
    """A kernel counts the blocks of a row that are done, to know the last one."""

    def steps(params, optimizer):
        for seed in range(5):
            put_grads(params, seed)
            if seed in (1, 2) and guard:
                params[seed].grad[3] = float("inf")
            optimizer.step()

    params, optimizer = params_and_optimizer(sizes=SIZES, device=target.device, **guard)
    steps(params, optimizer)
    assert same_bits(all_weights(params), weights_by_new_plans(steps, sizes=SIZES, device=target.device, **guard))
    assert {int(state["step"]) for state in optimizer.state.values()} == {3 if guard else 5}


def in_groups(count, device="cpu"):
    params = [torch.nn.Parameter(torch.full((1 + i % 3,), 1.0 + i, device=device)) for i in range(2 * count)]
    groups = [
        {"params": params[i::count], "lr": 0.1 / (1 + i), "betas": (0.9 - i / 200, 0.99), "maximize": i % 2 > 0}
        for i in range(count)
    ]
    return params, AdamW(groups, max_norm=1.0)


@pytest.mark.parametrize("count", [1, 17, 61, 130])
def test_each_parameter_steps_by_the_options_of_its_group(emulated, count):
    """Many groups take several launches."""
    params, optimizer = in_groups(count)
    for seed in range(3):
        put_grads(params, seed)
        optimizer.step()
    by_reference = in_groups(count)
    for seed in range(3):
        put_grads(by_reference[0], seed)
        with TARGETS["cpu-reference"].active():
            by_reference[1].step()
    assert torch.equal(optimizer.grad_norm, by_reference[1].grad_norm)
    assert same_bits(all_weights(params), all_weights(by_reference[0]))


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
def test_the_step_after_one_that_failed_midway_is_right(emulated, call):
    """The step has five launches: one takes rows to the device, two look at grads, two step. What was launched before
    the failed one is done, as on a GPU; but the next step doesn't go on with its counts of blocks."""
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
