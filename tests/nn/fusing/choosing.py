"""A small table for tests of what a fused module keeps of its choices, and models for it."""

from math import inf

import pytest
import torch
from torch import nn

from mpkernels import selector
from mpkernels.nn import fuse
from mpkernels.selector import table
from tests.linear.choosing import empty_selector
from tests.nn.fusing.models import Mlp, X


class Silu(Mlp):
    """An MLP that the table below gives to our kernel in 16 rows and more."""

    def __init__(self):
        super().__init__()
        self.act = nn.SiLU()

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


def in_a_row(kind=nn.GELU):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), kind(), nn.Linear(16, 8))


@pytest.fixture(autouse=True)
def asked(monkeypatch):
    """Return a list that gets each case which the selector is asked about. The table has a line for MLPs with SiLU of
    16 rows and 16 hidden features at least, and one for those with GELU of 64 hidden features."""
    asked, ask = [], selector.choose

    def choose(case, *rest):
        asked.append(case)
        return ask(case, *rest)

    empty_selector(monkeypatch)
    monkeypatch.setattr(selector, "choose", choose)
    facts = "cpu", table.FP32, ("mlp",)
    lines = [
        table.Line(*facts, ("silu",), False, (16, inf), 16, "native", ""),
        table.Line(*facts, ("gelu",), False, (1, inf), 64, "native", ""),
    ]
    monkeypatch.setattr(table, "TABLE", lines)
    return asked


def fused(make, x=X):
    """Return a fused model that was called."""
    model = make()
    fuse(model)
    model(x)
    return model
