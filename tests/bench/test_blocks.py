"""The benchmark's blocks, their baselines, and how their memory is counted."""

from functools import partial

import pytest
import torch
from torch.testing import assert_close

from benchmarks import blocks, cases
from benchmarks.counting import count, saved_bytes
from mpkernels.bench.linear import Shape
from mpkernels.bench.settings import Place, Setting

pytestmark = pytest.mark.exhaustive


def test_peak_memory_is_that_of_the_tensors():
    def make():
        kept = torch.zeros(1000)

        def run():
            for _ in range(2):  # the second allocation comes after the first is freed
                doubled = kept * kept
                del doubled

        return run

    assert count(make, "cpu") == {"kept": 4000, "peak memory": 2 * 4000}


def test_what_only_the_first_run_needs_is_not_in_the_peak():
    def make():
        first = [10_000]
        return lambda: torch.zeros(first.pop() if first else 1000)

    assert count(make, "cpu") == {"kept": 0, "peak memory": 4000}


def test_what_is_saved_is_counted_once_without_parameters_and_inputs():
    weight, x = torch.ones(10, requires_grad=True), torch.ones(100, 10)

    def run():
        h = x * weight  # saves x and weight, which outlive the run
        return (h.sin() + h.cos() + weight.view(2, 5).exp().sum()).sum().backward()

    assert saved_bytes(run) == 4 * (100 * 10 + 10)  # h, and exp's result


def test_blocks_are_beside_eager_compiled_and_liger():
    def lines(device, dtype):
        found = [it for it in cases._blocks(Place(device, 1)) if it.setting.dtype == dtype]
        return {(it.op, it.variant, it.baseline) for it in found}

    tuned = {(name, variant, cases.TUNED) for name in blocks.BLOCKS for variant in ("", "compiled")}
    ligers = {("swiglu_mlp", "", cases.LIGER), ("geglu_mlp", "", cases.LIGER)}
    eager = {(name, "", cases.EAGER) for name in blocks.BLOCKS}
    assert lines("cpu", "bf16") == lines("cuda", "bf16") == tuned | ligers | eager
    assert lines("cpu", "fp32") == tuned | ligers | {(name, "", "torch eager") for name in blocks.BLOCKS}


@pytest.mark.parametrize("name", blocks.BLOCKS)
def test_a_block_is_measured_beside_the_same_of_torchs(name, monkeypatch):
    quickly = partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(torch, "compile", lambda module, mode: quickly(module))
    setting = Setting(Place("cpu", 1), "fp32", Shape(3, 16, 24).sizes())
    want, *others = (
        side(setting, name, compiled)()() for side in (blocks.torchs, blocks.ours) for compiled in (False, True)
    )
    for got in others:
        assert_close(got, want)


@pytest.mark.parametrize("name", blocks.BLOCKS)
def test_memory_of_a_block_is_counted(name):
    setting = Setting(Place("cpu", 1), "fp32", Shape(64, 16, 24).sizes())
    pair = blocks.compare(setting, name, blocks.ours(setting, name), blocks.torchs(setting, name))
    assert pair.is_counted
    assert {*count(pair.ours, "cpu")} == {"kept", "peak memory", "saved"}
    hidden = 4 * 64 * 24
    assert count(pair.theirs, "cpu")["saved"] == hidden * (2 if name == "gelu_mlp" else 4)
