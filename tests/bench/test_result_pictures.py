"""RESULTS.md's pictures and the numbers of README's first screen come from the raw samples alone."""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from benchmarks import adamw_beside_others, readme_numbers, result_pictures
from benchmarks.raw_samples import Session
from mpkernels.bench import steps
from mpkernels.bench.results import Result
from mpkernels.bench.settings import Place, Setting, Sizes

MACHINE = {"gpu": None, "cpu": "AMD EPYC, family 25 model 1", "cores": 2, "torch": "2.13.0", "mpkernels": "0.1.0"}


def session(kept=(14.0, 16.0), ratio=2.0):
    """Return a run of all that adamw_beside_others.py compares. Ours takes 1 to 6 us, the others ``ratio`` times as
    long on one thread, twice that on two."""
    found = []
    for threads in (1, 2):
        for case in adamw_beside_others.comparisons(Place("cpu", threads)):
            sizes = case.setting.sizes
            counts = {
                name: {"kept": int(each * sizes.elements), "peak memory": int((each + 1) * sizes.elements)}
                for name, each in zip(("ours", "theirs"), kept, strict=True)
            }
            place, dtype = str(case.setting.place), case.setting.dtype
            ours = [float(it) for it in range(1, 7)]
            theirs = [ratio * threads * it for it in ours]
            found.append(
                Result(
                    case.op, case.variant, place, dtype, sizes.name, "native", 1, 0.0, ours, theirs, case.baseline,
                    counts=counts,
                )
            )  # fmt: skip
    return Session("2026-11-26", MACHINE, results=found)


@pytest.mark.parametrize("clips", [True, False])
def test_both_sides_take_the_same_step(clips, monkeypatch):
    """Our step ends at the weights of torch's fused AdamW."""
    made, parameters = [], steps.parameters
    monkeypatch.setattr(steps, "parameters", lambda *words: made.append(parameters(*words)) or made[-1])
    rival = next(adamw_beside_others.rivals(Place("cpu", 1)))
    pair = adamw_beside_others.compare(Setting(Place("cpu", 1), "fp32", Sizes("small", ((1000,),) * 3)), rival, clips)
    for side in (pair.ours, pair.theirs):
        run = side()
        for _ in range(5):
            run()
    for ours, theirs in zip(*made, strict=True):
        assert_close(ours, theirs)
    norms = [torch.nn.utils.get_total_norm([it.grad for it in params]) for params in made]
    assert [round(float(norm), 3) == steps.MAX_NORM for norm in norms] == [False, clips]  # ours writes no grads


def test_no_ratio_is_shown_that_other_programs_have_disturbed():
    """Counts are shown nevertheless."""
    run = session()
    busy = replace(run, results=[replace(it, waited=0.2) for it in run.results])
    assert [family.name for family in result_pictures.of_run("cpu", busy)] == ["bytes-cpu"]
    header, _, row, *_ = readme_numbers.numbers({"cpu": busy}, [], [])
    assert header.endswith("| bytes a parameter: ours / theirs |")
    assert row == "| bf16 weights, fp32 moments; beside torch's fused, fp32 weights | 14 / 16 |"
    partly = replace(run, results=[*run.results[:-1], busy.results[-1]])
    times, _ = result_pictures.of_run("cpu", partly)
    assert len(times.rows) == 2 * (len(run.results) - 1)


def test_a_run_that_was_cut_off_shows_what_it_has():
    run = session()
    only = replace(run, results=[it for it in run.results if it.baseline == "torchao-8bit"])
    _, _, row, _ = readme_numbers.numbers({"cpu": only}, [], [])
    assert row.startswith("| fp32 weights, 8-bit moments; beside torchao's | 14 / 16 |")
