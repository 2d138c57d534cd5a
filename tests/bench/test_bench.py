"""The parts of a benchmark: the interval of the median, turns, cases, inputs."""

import argparse
import math
import os
import subprocess
import sys
from dataclasses import replace
from math import comb

import pytest
import torch

from benchmarks import cases, every_op
from benchmarks.cases import all_cases
from mpkernels.bench import cases as shipped
from mpkernels.bench import command, measuring, steps
from mpkernels.bench.pairs import Pair, measure, median_interval
from mpkernels.bench.results import Result
from mpkernels.bench.settings import FOUR_LARGE, HUNDRED, THOUSAND, Place, Setting, Sizes
from mpkernels.doctor.samples import SAMPLES

pytestmark = pytest.mark.exhaustive


def test_the_interval_holds_the_median_in_95_of_100():
    for size in range(6, 102):
        low, _, high = median_interval([float(value) for value in range(size)])
        outside = int(low)  # how many samples lie below the interval, and above it
        assert high == size - 1 - outside
        missed = 2 * sum(comb(size, heads) for heads in range(outside + 1)) / 2**size
        assert missed <= 0.05
        narrower = missed + 2 * comb(size, outside + 1) / 2**size
        assert narrower > 0.05


@pytest.mark.parametrize("seconds", [0, -1])  # on a busy machine, one build may take longer than all of the time
def test_a_pair_is_timed_in_turns(seconds):
    calls = []
    pair = Pair(lambda: lambda: calls.append("ours"), lambda: lambda: calls.append("theirs"))
    samples = measure(pair, "cpu", seconds=seconds)
    assert len(samples.ours) == len(samples.theirs) == 6
    assert min(samples.ours + samples.theirs) > 0
    assert calls[-24:] == ["ours", "theirs", "theirs", "ours"] * 6


def test_the_samples_of_all_turns_make_one_result():
    first = Result("op", "", "cpu-1", "fp32", "case", "native", 8, 0.5, [1.0] * 6, [2.0] * 6, counts={"ours": {}})
    both = first.and_more(replace(first, waited=0.0, ours_us=[3.0] * 18, torch_us=[3.0] * 18, counts={}))
    assert (both.name, both.counts) == (first.name, first.counts)
    assert (both.ours_us, both.torch_us) == ([1.0] * 6 + [3.0] * 18, [2.0] * 6 + [3.0] * 18)
    assert both.waited == 0.125  # the share over all samples


def test_each_case_has_a_name_of_its_own():
    names = [case.name for case in shipped.all_cases()]
    assert len(names) == len(set(names))
    assert {*names} < {case.name for case in all_cases()}


def test_random_inputs_have_the_sizes_and_dtype_and_repeat():
    sizes = [(3,), (2**20 + 5,), (2, 4)]
    tensors = Setting(Place("cpu", 1), "bf16", Sizes("case", tuple(sizes))).tensors()
    assert [tuple(tensor.shape) for tensor in tensors] == sizes
    assert all(tensor.dtype == torch.bfloat16 and tensor.unique().numel() > 2 for tensor in tensors)
    assert tensors[1][-5:].tolist() == tensors[1][:5].tolist()


@pytest.mark.parametrize("failing", [0, 1])
def test_a_turn_that_fails_is_reported(monkeypatch, capsys, failing):
    """The samples of other turns are kept, too."""
    turns = []

    def run_one(benchmark, seconds, builds):
        turns.append(benchmark.name)
        if len(turns) - 1 == failing:
            raise RuntimeError("no luck")
        return measuring.run_one(benchmark, seconds=0, builds=1)

    monkeypatch.setattr(command, "run_one", run_one)
    monkeypatch.setattr(command, "QUICK_SECONDS", math.inf)  # a minute may be too short on a busy machine
    arguments = argparse.ArgumentParser()
    command.add_arguments(arguments)
    code = command.run(arguments.parse_args(["--quick", "--only", "unscale_"]), pytest.fail)
    (name,) = set(turns)
    output = capsys.readouterr().out
    assert (code, len(turns)) == (1, 4)
    assert f"left out: {name}: failed, RuntimeError: no luck" in output
    assert output.count(name) == 2  # once in the table


@pytest.mark.parametrize("omp_num_threads", [None, "1"])
def test_places_are_one_thread_and_as_many_as_torch_takes(omp_num_threads):
    """OMP_NUM_THREADS, if it is set, says how many torch takes."""
    code = "import torch; from mpkernels.bench.settings import places; print(torch.get_num_threads(), *places())"
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    environment |= {"CUDA_VISIBLE_DEVICES": ""} | ({"OMP_NUM_THREADS": omp_num_threads} if omp_num_threads else {})
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    threads, *places = done.stdout.split()
    assert places == [f"cpu-{each}" for each in sorted({1, int(threads)})]
    assert threads == (omp_num_threads or threads)


@pytest.mark.parametrize("case", [sizes.name for sizes in (cases.SHORT, FOUR_LARGE, HUNDRED, THOUSAND)])
def test_each_number_of_threads_is_measured_with_a_scaler_and_without(monkeypatch, case):
    for module in (cases, shipped):
        monkeypatch.setattr(module, "places", lambda: [Place("cpu", 1), Place("cpu", 2)])
    names = {it.name for it in all_cases()}
    for place in ("cpu-1", "cpu-2"):
        for step in ("bf16", "fp32"):
            assert f"step {place} {step} {case} vs torch fused" in names
        assert f"step imports {place} fp32 {case} vs torch fused" in names
        assert f"step imports-clipping {place} fp32 {case} vs torch fused" in names
        assert f"step {place} bf16 100x500k vs torch.amp fused" in names


@pytest.mark.parametrize("share", [1.0, 0.999])
def test_a_loop_whose_imports_are_changed_clips_in_each_run_or_in_none(monkeypatch, share):
    sides = []
    made = steps.parameters
    monkeypatch.setattr(steps, "parameters", lambda *words: sides.append(made(*words)) or sides[-1])
    setting = Setting(Place("cpu", 1), "fp32", Sizes("tiny", ((300,), (40,))))
    pair = steps.compare_imports(setting, share)
    runs = pair.ours(), pair.theirs()
    first = [torch.cat([param.grad for param in params]).norm().item() for params in sides]
    for number in range(4):  # the first clips none
        for run in runs:
            run()
        norms = [torch.cat([param.grad for param in params]).norm().item() for params in sides]
        assert norms == pytest.approx([norm * share**number for norm in first], rel=1e-5)
    assert pair.moved == 340 * (32 if share == 1 else 40)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, under Triton's interpreter
def test_compute_sanitizer_is_shown_every_op(capsys):
    every_op.main(torch.device("cpu"))
    assert int(capsys.readouterr().out.split()[0]) > len(SAMPLES)
