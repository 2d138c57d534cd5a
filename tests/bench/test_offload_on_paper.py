"""The tables of docs/offload.md are those that benchmarks/offload_on_paper.py computes.
tests/cuda/test_offload_bytes.py compares their bytes with a step's allocations on a device."""

import re

import pytest
import torch

from benchmarks import offload_on_paper
from benchmarks.offload_on_paper import CHOICES, ELEMENTS, Choice
from tests import ROOT, libraries

B16 = torch.bfloat16


def test_the_page_has_what_is_computed():
    text = offload_on_paper.PAGE.read_text()
    assert offload_on_paper.page(text) == text
    for table in ("memory", "traffic", "tokens"):
        at = text.index(" | ", text.index(offload_on_paper.BEGIN.format(table)))
        assert offload_on_paper.page(text[:at] + " | 9.99" + text[at:]) == text


def test_a_page_without_a_tables_place_is_refused():
    with pytest.raises(SystemExit, match=r"offload.md: the lines .* are missing"):
        offload_on_paper.page("# Nothing")


def test_bytes_are_those_that_a_calculation_by_hand_gives():
    """The bytes of weight, remainder or copy, and two moments."""
    kept = {choice: offload_on_paper.kept(choice) for choice in CHOICES}
    assert len(kept) == 9
    assert kept[Choice(B16, "split", torch.float32)] == (2, 2 + 4 + 4)
    assert kept[Choice(B16, "fp32", B16)] == (2, 4 + 2 + 2)
    assert kept[Choice(B16, "split", torch.int8)] == (2, 2 + 1 + 1 + 2 * 4 / 256)
    assert kept[Choice(torch.float32, "split", torch.float32)] == (4, 4 + 4)


def test_seconds_are_those_that_a_calculation_by_hand_gives():
    ours = offload_on_paper.ours(Choice(B16, "split", torch.float32))
    assert ours.step == 2 + 2 + 2 * (2 + 2 + 4 + 4)
    assert 8e9 * ours.to_host / 25e9 == pytest.approx(0.64)
    assert 8e9 * ours.after_backward(25e9) == pytest.approx(2.24)
    slow = ours._replace(step=1)  # then the bus decides
    assert slow.after_backward(25e9) == pytest.approx(2 / 25e9)
    assert slow._replace(overlaps=False).after_backward(25e9) == pytest.approx(2 / 25e9 + 1 / 100e9)


def test_the_pages_measured_times_are_those_of_the_output():
    log = (ROOT / "benchmarks" / "results" / "gpu" / "offload-h200-2026-11-26.txt").read_text()
    after = dict(re.findall(r"^(offload, .*): whole .*, step after it ([\d.]+),", log, re.MULTILINE))
    steps = [float(after[f"offload, {kind}"]) for kind in ("max_norm", "int8", "max_norm, released", "int8, released")]
    (ours,) = re.findall(r"^offload, max_norm: whole ([\d.]+) ms", log, re.MULTILINE)
    theirs, *_ = re.findall(r"^torchao .* no clip, bf16 states and no master: whole ([\d.]+) ms", log, re.MULTILINE)
    page = " ".join(offload_on_paper.PAGE.read_text().split())
    words = "the step takes {:.0f} ms, with int8 moments {:.0f}; after `release_grads` {:.0f} and {:.0f}."
    assert words.format(*steps) in page
    assert f"A whole iteration takes {float(ours):.0f} ms," in page
    assert f"with torchao's optimizer {float(theirs):.0f}, without masters and clipping." in page
    assert "1.07e9 parameters, NVIDIA H200, 16 threads" in log


@pytest.mark.parametrize("dtype", [torch.float32, B16])
def test_torchaos_bytes_are_those_that_its_optimizer_holds(dtype):
    if why := libraries.why_missing("torchao"):
        pytest.skip(why)
    from tests.matrix.offloading import CPUOffloadOptimizer, on_a_cpu

    weight = torch.nn.Parameter(torch.ones(ELEMENTS, dtype=dtype))
    with on_a_cpu():
        optimizer = CPUOffloadOptimizer([weight])
        weight.sum().backward()
        optimizer.step()
    ((copy, inner),) = ((optimizer.param_d2h_map[it], inner) for it, inner in optimizer.optim_dict.items())
    states = [it for key, it in inner.state[copy].items() if key != "step"]
    way = offload_on_paper.torchaos(dtype.itemsize)
    assert way.on_host == offload_on_paper.bytes_of([copy, copy.grad, *states])
    assert (way.on_gpu, way.to_host, way.to_gpu) == (dtype.itemsize, copy.grad.itemsize, copy.itemsize)
