"""Whole models, fused and plain: what is measured on a small one, and what the book shows of it."""

import json
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from benchmarks import models
from tests.networks import one_thread

__all__ = ["one_thread"]  # a fixture that each test uses

ROWS, WIDTH, HIDDEN = 8, 16, 64
pytestmark = [pytest.mark.exhaustive, pytest.mark.begins_first]
SIDES = ["ours", "theirs", "ours compiled", "theirs compiled"]


class Output(NamedTuple):
    loss: Tensor


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        return Output(self.fc2(self.act(self.fc1(x))).sum())


def make():
    return Model(), {"x": torch.ones(ROWS, WIDTH)}


def test_each_side_is_timed_and_counted(monkeypatch, tmp_path):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    numbers = models.DTYPES["cpu"]
    rows = [{"model": "small", "dtype": dtype, **models.measure(make, *it, "cpu")} for dtype, it in numbers.items()]
    for row in rows:
        assert row["sites"] == ["mlp, gelu"]
        assert {side: len(seconds) for side, seconds in row["seconds"].items()} == dict.fromkeys(SIDES, models.ROUNDS)
        assert sorted(row["peak"]) == sorted(row["saved"]) == sorted(SIDES)
        assert all(row["peak"][side] >= row["saved"][side] for side in SIDES)
    full, hidden = rows[1], 4 * ROWS * HIDDEN
    assert full["saved"]["theirs"] == 2 * hidden  # GELU's input, and the second layer's
    assert full["saved"]["ours"] in (hidden, 2 * hidden)  # the table may say torch
    path = tmp_path / "small.json"
    path.write_text(json.dumps({"rows": rows}))
    header, cells = models.table(path)
    assert list(header) == list(models.COLUMNS)
    assert len(list(cells)) == 2
