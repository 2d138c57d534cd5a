"""Liger's MLPs as the benchmark makes and calls them, against the real library."""

import warnings

import pytest
import torch
from torch.nn import functional
from torch.testing import assert_close

from benchmarks import blocks, cases, other_libraries
from mpkernels.bench.linear import Shape
from mpkernels.bench.settings import Place, Setting

pytest.importorskip("liger_kernel", reason="needs the extra integrations")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from liger_kernel.ops import LigerGELUMulFunction, LigerSiLUMulFunction

SETTING = Setting(Place("cpu", 1), "fp32", Shape(3, 16, 24).sizes())


@pytest.mark.parametrize("name", other_libraries.LIGERS_BLOCKS)
def test_all_but_the_kernel_computes_what_torch_does(monkeypatch, name):
    """Liger's kernel needs a GPU, so torch's formula stands for it."""
    monkeypatch.setattr(LigerSiLUMulFunction, "apply", lambda a, b, *scales: functional.silu(a) * b)
    monkeypatch.setattr(LigerGELUMulFunction, "apply", lambda a, b: functional.gelu(a, approximate="tanh") * b)
    ligers, torchs = blocks.ligers(SETTING, name)(), blocks.torchs(SETTING, name)()
    assert_close(ligers(), torchs(), rtol=0, atol=0)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_liger_is_measured_on_cuda_alone(device):
    ligers = [it for it in cases._blocks(Place(device, 1)) if it.baseline == cases.LIGER]
    assert {it.op for it in ligers} == {*other_libraries.LIGERS_BLOCKS}
    assert {it.missing for it in ligers} == {"" if device == "cuda" else "liger_kernel needs CUDA"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="Liger's kernels need CUDA")
@pytest.mark.parametrize("name", other_libraries.LIGERS_BLOCKS)
def test_the_kernel_computes_what_torch_does(name):
    on_cuda = SETTING._replace(place=Place("cuda", 1))
    assert_close(blocks.ligers(on_cuda, name)()(), blocks.torchs(on_cuda, name)()())
