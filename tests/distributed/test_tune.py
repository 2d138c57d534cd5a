"""Processes that tune: rank 0 times, and all get its choices."""

import pytest
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

import mpkernels
from mpkernels import selector
from mpkernels.nn import MLP, LinearAct
from mpkernels.selector import table, tune
from mpkernels.selector.timing import Timed
from tests.processes import needs_gloo, spawn

pytestmark = [needs_gloo, pytest.mark.exhaustive]


def as_rank(rank):
    """Give this rank a fastest kernel of its own. Return a list of the cases it times."""
    timed = []

    def time_ways(trial, names, device):
        timed.append(rank)
        return Timed({"native": 1.0 + rank, "torch": 1.5}, {})

    tune.time_ways = time_ways
    return timed


def ranks_that_train_together_follow_the_table(rank):
    """Replicas of DistributedDataParallel must compute the same bits, so each call goes by the table."""
    timed, choices = as_rank(rank), []
    choose = selector.choose

    def recorded(case, *more):
        choices.append((case, choose(case, *more)))
        return choices[-1][1]

    selector.choose = recorded
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Sequential(MLP(8, 32, activation="gelu_tanh"), LinearAct(8, 6)))
    for rows in (4, 128):
        model(torch.randn(rows, 8)).sum().backward()
    assert [name for _, name in choices] == [table.kernel(case) for case, _ in choices]
    assert [name for _, name in choices] == ["torch", "native", "native", "torch"]
    assert timed == []


def after_tune_all_choose_as_rank_0(rank):
    timed = as_rank(rank)
    torch.manual_seed(rank)
    model = torch.nn.Sequential(LinearAct(8, 6), torch.nn.BatchNorm1d(6), LinearAct(6, 4))
    model, x = DistributedDataParallel(model), torch.randn(5, 8)
    model(x)  # forgets earlier choices
    buffers = [it.clone() for it in model.buffers()]
    report = mpkernels.tune(model, x)
    assert all(torch.equal(*pair) for pair in zip(buffers, model.buffers(), strict=True))
    assert timed == [0, 0] * (rank == 0)
    assert [it.best for it in report.timed.values()] == ["native", "native"]
    for _ in range(2):
        model(x).sum().backward()
    assert {*selector.choices().values()} == {"native"}
    outputs = [torch.zeros(5, 4) for _ in range(2)]
    x = torch.ones(5, 8)
    distributed.all_gather(outputs, model.eval()(x).detach())
    assert torch.equal(*outputs)


def an_error_on_one_rank_is_raised_by_all(rank):
    as_rank(rank)
    features = 8 - rank
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"^tune: rank 1 raised ValueError\(.linear_act: x must"):
            mpkernels.tune(LinearAct(8, 6), torch.randn(5, features))
    else:
        with pytest.raises(ValueError, match="linear_act: x must have weight's 8 features"):
            mpkernels.tune(LinearAct(8, 6), torch.randn(5, features))


CHECKS = (
    *(ranks_that_train_together_follow_the_table, after_tune_all_choose_as_rank_0),
    an_error_on_one_rank_is_raised_by_all,
)


@pytest.mark.parametrize("check", CHECKS, ids=lambda it: it.__name__)
def test_two_processes(tmp_path, check):
    spawn(check, tmp_path)
