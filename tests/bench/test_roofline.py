"""A step moves as many bytes as benchmarks assume; these bound how fast it can be beside torch's."""

import pytest
import torch

import mpkernels
from benchmarks import optimizers
from mpkernels.bench import steps
from mpkernels.optim import AdamW
from tests import ROOT
from tests.optim.test_step_costs import COSTS, SIZE, Traffic, params_of


@pytest.mark.parametrize(("dtype", "options", "kept", "moved"), COSTS, ids=str)
def test_the_bytes_that_benchmarks_assume_are_those_that_are_counted(dtype, options, kept, moved):
    state_dtype = options.get("state_dtype", torch.float32)
    scales = 4 * 4 / 256 if state_dtype == torch.int8 else 0  # the scales of two moments, read and written
    assert steps.bytes_of_our_step(dtype, **options) == moved + scales
    assert optimizers.bytes_of_torchs_step() == 48


@pytest.mark.parametrize(("name", "alone", "scaled"), [
    ("adamw", 1.25, 1.5), ("adam", 1.25, 1.5), ("sgd-momentum", 4 / 3, 5 / 3), ("sgd", 1.5, 2.0),
])  # fmt: skip
def test_each_rules_bytes_allow_this_speed_beside_torch(name, alone, scaled):
    """Rules have as many states as their optimizers. Lion is left out: its rival isn't fused."""
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


def test_the_page_has_the_bytes_that_are_counted():
    """The page's columns with and without clipping. tests/optim/test_step_costs.py has the one under a scaler."""
    page = (ROOT / "docs" / "performance.md").read_text().partition("moved: unscale")[2]
    rows = [line.strip("| ").split(" | ")[2:] for line in page.partition("\n\n")[0].splitlines()[2:]]
    torchs, *ours = [[int(cell.split()[0]) for cell in row] for row in rows]
    assert torchs == [16, *(optimizers.bytes_of_torchs_step(2, *does) for does in BESIDE_STEP)]
    assert torchs[2:] == [moved_by_torch(clips=True), moved_by_torch(clips=False)]
    costs = [cost for cost in COSTS if cost[0] != torch.float16]
    for counted, (dtype, options, kept, scaled) in zip(ours, costs, strict=True):
        assert counted == [kept, scaled, *(moved_by_ours(dtype, options, clips) for clips in (True, False))]


BESIDE_STEP = (True, True), (False, True), (False, False)  # whether torch unscales, and clips


def moved_by_torch(clips):
    (param,) = params_of(torch.float32)
    optimizer = torch.optim.AdamW([param], fused=True)
    optimizer.step()
    with Traffic() as traffic:
        if clips:
            torch.nn.utils.clip_grad_norm_([param], 1.0)
        optimizer.step()
    never_written = 4  # the grads: the fused step only claims to write them
    return traffic.bytes / SIZE - never_written


def moved_by_ours(dtype, options, clips):
    (param,) = params_of(dtype)
    optimizer = AdamW([param], max_norm=1.0 if clips else None, **options)
    with mpkernels.backend("reference"):
        optimizer.step()
        with Traffic() as traffic:
            optimizer.step()
    return traffic.bytes / SIZE
