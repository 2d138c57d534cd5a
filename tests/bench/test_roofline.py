"""The bytes that a step is said to move are those that are counted, and what they allow."""

import pytest
import torch

from benchmarks import optimizers
from mpkernels.bench import steps
from tests.optim.test_step_costs import COSTS


@pytest.mark.parametrize(
    ("dtype", "options", "kept", "moved"), [case for case in COSTS if "master" not in case[1]], ids=str
)
def test_bytes_that_are_claimed_are_those_that_are_counted(dtype, options, kept, moved):
    state_dtype = options.get("state_dtype", torch.float32)
    scales = 4 * 4 / 256 if state_dtype == torch.int8 else 0  # of two moments, read and written
    assert steps.bytes_of_our_step(dtype, state_dtype) == moved + scales
    assert optimizers.bytes_of_torchs_step() == 48


@pytest.mark.parametrize(("name", "alone", "scaled"), [
    ("adamw", 1.25, 1.5), ("adam", 1.25, 1.5), ("sgd-momentum", 4 / 3, 5 / 3), ("sgd", 1.5, 2.0),
])  # fmt: skip
def test_what_the_bytes_of_each_rule_allow(name, alone, scaled):
    """The states are those that the optimizers have; lion is beside a library that isn't fused."""
    param = torch.nn.Parameter(torch.ones(8))
    param.grad = torch.ones(8)
    rule = optimizers.RULES[name]
    for make in (rule.ours, rule.theirs):
        optimizer = make([param])
        optimizer.step()
        assert sum(it is not None and it.numel() > 1 for it in optimizer.state[param].values()) == rule.states
    ours = steps.bytes_of_our_step(torch.float32, states=rule.states)
    assert optimizers.bytes_of_torchs_step(rule.states, unscales=False) / ours == pytest.approx(alone)
    assert optimizers.bytes_of_torchs_step(rule.states) / ours == pytest.approx(scaled)
