"""What is timed lies in memory as the call's tensors do, and each layout has a choice of its own."""

import json
from itertools import product

import pytest
import torch

from mpkernels import selector
from mpkernels.functional import linear_act
from mpkernels.linear import paths
from mpkernels.selector import disk
from tests.linear_cases import transposed
from tests.races import run_by_all


@pytest.fixture
def timed(monkeypatch, tmp_path):
    """The strides of x and weight in each run of a trial."""
    strides, compute = [], paths.compute

    def compute_and_tell(kernel, x, weight, *rest):
        strides.append((x.stride(), weight.stride()))
        return compute(kernel, x, weight, *rest)

    for name, value in (("_is_deterministic", False), ("_known", {}), ("by_key", {})):
        monkeypatch.setattr(selector, name, value)
    monkeypatch.setattr(selector, "race", run_by_all)
    monkeypatch.setattr(paths, "compute", compute_and_tell)
    monkeypatch.setattr(disk, "path", lambda: tmp_path / "choices.json")
    disk._read.cache_clear()
    yield strides
    disk._read.cache_clear()


@pytest.mark.parametrize("trains", [True, False])
def test_each_layout_is_timed_as_it_is(timed, trains):
    """GPT-2 keeps its weights transposed. A contiguous call's choice is another one, on disk too."""
    x, weight = torch.randn(8, 16), torch.randn(24, 16)
    for x_is, weight_is in product((False, True), repeat=2):
        timed.clear()
        with torch.set_grad_enabled(trains):
            linear_act(transposed(x) if x_is else x, (transposed(weight) if weight_is else weight).requires_grad_())
        assert set(timed) == {((1, 8) if x_is else (16, 1), (1, 24) if weight_is else (16, 1))}
    variant = "linear_act gelu, with grad" if trains else "linear_act gelu"
    layouts = "", ", weight.t()", ", x.t()", ", x.t(), weight.t()"
    assert [*selector.choices()] == [f"{variant}{each} 8x16x24 float32,float32,float32" for each in layouts]
    assert len(json.loads(disk.path().read_text())) == 4
