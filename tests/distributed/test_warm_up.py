"""Processes that choose: each by what it knows, until rank 0 has told all."""

from functools import partial

import pytest
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from mpkernels import selector
from mpkernels.nn import LinearAct
from mpkernels.selector import disk
from mpkernels.selector.case import Case, Choice
from tests.processes import needs_gloo, spawn
from tests.races import won_by

pytestmark = needs_gloo
ON_DISK = ("torch", "native")  # of each rank, for layers with 6 outputs
CASE = Case(
    "linear_act", torch.device("cpu"), (8, 6), (torch.float32,) * 3, "gelu + bias, with grad", 8, ("native", "torch")
)


def as_rank(folder, rank, winner="torch"):
    """A disk of its own, that disagrees with the other's. Return the cases that are timed."""
    raced = []

    def race(trial, names, device):
        raced.append(rank)
        return won_by(winner)(trial, names, device)

    selector.race = race
    disk.path = lambda: folder / str(rank) / "choices.json"
    disk.save(CASE.key(), CASE.device, Choice(ON_DISK[rank], {}), {})
    return raced


def by_itself(folder, rank):
    raced = as_rank(folder, rank)
    for outputs, name in ((6, ON_DISK[rank]), (7, "native")):
        for _ in range(2):
            y = LinearAct(8, outputs)(torch.randn(5, 8))
            assert type(y.grad_fn).__name__ == {"torch": "GeluBackward0", "native": "_LinearActBackward"}[name]
    assert raced == []
    assert list(selector.choices().values()) == [ON_DISK[rank]]


def test_without_it_nothing_is_timed(tmp_path):
    spawn(partial(by_itself, tmp_path), tmp_path)


def warmed_up(folder, rank):
    raced = as_rank(folder, rank)
    torch.manual_seed(rank)
    model = torch.nn.Sequential(LinearAct(8, 6), torch.nn.BatchNorm1d(6), LinearAct(6, 4))
    model, x = DistributedDataParallel(model), torch.randn(5, 8)
    model(x)  # what was chosen before does not count
    buffers = [it.clone() for it in model.buffers()]
    selector.warm_up(model, x)
    assert all(torch.equal(*pair) for pair in zip(buffers, model.buffers(), strict=True))
    assert raced == [0] * (rank == 0)  # the second layer; the disk knows the first
    assert list(selector.choices().values()) == ["torch", "torch"]
    for _ in range(2):
        model(x).sum().backward()
    outputs = [torch.zeros(5, 4) for _ in range(2)]
    x = torch.ones(5, 8)
    distributed.all_gather(outputs, model.eval()(x).detach())
    assert torch.equal(*outputs)
    assert len(raced) == (rank == 0)


def test_after_it_all_choose_as_rank_0(tmp_path):
    spawn(partial(warmed_up, tmp_path), tmp_path)


def failing(folder, rank):
    as_rank(folder, rank)
    features = 8 - rank
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"^selector.warm_up: rank 1 raised ValueError\(.linear_act: x must"):
            selector.warm_up(LinearAct(8, 6), torch.randn(5, features))
    else:
        with pytest.raises(ValueError, match="linear_act: x must have weight's 8 features"):
            selector.warm_up(LinearAct(8, 6), torch.randn(5, features))


def test_an_error_on_one_rank_is_raised_by_all(tmp_path):
    spawn(partial(failing, tmp_path), tmp_path)
