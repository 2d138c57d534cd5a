"""What is under the benchmark's numbers: the interval, what is counted, the prediction, the book."""

import argparse
import math
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from math import comb

import pytest
import torch

from benchmarks import book, counted, front
from mpkernels.bench import cases, command, measuring, roofline, show, steps
from mpkernels.bench.cases import all_cases
from mpkernels.bench.pairs import Pair, measure, median_interval
from mpkernels.bench.results import Result, Run
from mpkernels.bench.roofline import GPUS, Work
from mpkernels.bench.settings import Case, Place, Setting
from tests import ROOT
from tests.optim.test_step_costs import COSTS


def test_the_interval_holds_the_median_in_95_of_100():
    for size in range(6, 102):
        low, _, high = median_interval([float(value) for value in range(size)])
        outside = int(low)  # so many samples lie below, and above
        assert high == size - 1 - outside
        missed = 2 * sum(comb(size, heads) for heads in range(outside + 1)) / 2**size
        assert missed <= 0.05
        narrower = missed + 2 * comb(size, outside + 1) / 2**size
        assert narrower > 0.05


def test_a_pair_is_timed_in_turns():
    calls = []
    pair = Pair(lambda: lambda: calls.append("ours"), lambda: lambda: calls.append("theirs"))
    samples = measure(pair, "cpu", seconds=0)
    assert len(samples.ours) == len(samples.theirs) == 6
    assert calls[-24:] == ["ours", "theirs", "theirs", "ours"] * 6


def test_time_that_is_overdrawn_still_gives_samples():
    """A build that took longer than all of it, on a busy machine."""
    pair = Pair(lambda: lambda: None, lambda: lambda: None)
    samples = measure(pair, "cpu", seconds=-1)
    assert len(samples.ours) == 6
    assert min(samples.ours + samples.theirs) > 0


def test_turns_are_taken_together():
    first = Result("op", "", "cpu-1", "fp32", "case", "native", 8, 0.5, [1.0] * 6, [2.0] * 6, counts={"ours": {}})
    both = first.and_more(replace(first, waited=0.0, ours_us=[3.0] * 18, torch_us=[3.0] * 18, counts={}))
    assert (both.name, both.counts) == (first.name, first.counts)
    assert (both.ours_us, both.torch_us) == ([1.0] * 6 + [3.0] * 18, [2.0] * 6 + [3.0] * 18)
    assert both.waited == 0.125  # of all samples


@pytest.mark.parametrize(
    ("dtype", "options", "kept", "moved"), [case for case in COSTS if "master" not in case[1]], ids=str
)
def test_bytes_that_are_predicted_are_those_that_are_counted(dtype, options, kept, moved):
    state_dtype = options.get("state_dtype", torch.float32)
    scales = 4 * 4 / 256 if state_dtype == torch.int8 else 0  # of two moments, read and written
    assert steps.bytes_of_our_step(dtype, state_dtype) == moved + scales
    assert steps.bytes_of_torchs_step() == 48


@pytest.mark.parametrize(
    ("dtype", "variant", "ratio"),
    [("fp32", "", "1.50"), ("bf16", "", "1.71"), ("bf16", "moments-bf16", "2.40"), ("bf16", "moments-8bit", "2.99")],
)
def test_the_prediction_of_a_large_step_is_that_of_its_bytes(dtype, variant, ratio):
    for gpu in GPUS.values():
        assert f"{roofline.ratio(gpu, *counted.step(dtype, variant, '1x1e9')):.2f}" == ratio


def test_a_prediction():
    gpu = roofline.find("NVIDIA H200")
    assert gpu is GPUS["H200"]
    assert roofline.find("Abacus") is None
    assert Work(4.3e12).seconds(gpu) == pytest.approx(1)  # as measured, DESIGN's figures
    assert Work(0, 790e12).seconds(gpu) == pytest.approx(1)
    assert Work(4.3e12, 790e12, 10).seconds(gpu) == pytest.approx(2)
    assert Work(0, 0, 10).seconds(gpu) == 10 * roofline.LAUNCH


def test_fusing_pays_where_activations_weigh_most():
    """At small K; at K >= 4096 it is a few percent."""
    narrow, wide = (
        roofline.ratio(GPUS["H200"], *counted.linear_act(it)) for it in ((8192, 768, 3072), (8192, 4096, 16384))
    )
    assert 1.1 < narrow < 1.3
    assert 1.0 < wide < 1.06


def test_names_of_cases_are_unique():
    names = [case.name for case in all_cases()]
    assert len(names) == len(set(names))


@pytest.fixture
def copy(tmp_path):
    for path in ("README.md", "benchmarks/RESULTS.md"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    shutil.copytree(ROOT / "benchmarks" / "results", tmp_path / "benchmarks" / "results")
    return tmp_path


def test_the_book_is_what_the_raw_files_say(capsys):
    assert book.main(["--check"]) == 0, capsys.readouterr().out


@pytest.mark.parametrize("name", ["README.md", "benchmarks/RESULTS.md"])
def test_a_number_typed_by_hand_is_noticed(copy, capsys, name):
    path = copy / name
    text = path.read_text()
    at = text.index("| ", text.index(book.BEGIN.format("results")) if name == "README.md" else text.index("|---"))
    path.write_text(text[:at] + "| 9.99 " + text[at:])
    assert book.main(["--check"], copy) == 1
    assert f"{name} has drifted" in capsys.readouterr().out
    assert book.main([], copy) == 0
    assert path.read_text() == text


@pytest.mark.parametrize("name", sorted(path.name for path in book.ROOT.glob("benchmarks/results/*.json")))
def test_changed_samples_are_noticed(copy, name):
    path = copy / "benchmarks" / "results" / name
    path.write_text(path.read_text().replace('us":[', 'us":[1,1,1,1,1,1,1,1,1,', 2))
    assert book.main(["--check"], copy) == 1


def test_a_chart_of_no_results_is_noticed(copy):
    orphan = copy / "benchmarks" / "results" / "orphan.svg"
    orphan.write_text("<svg/>")
    assert book.main(["--check"], copy) == 1
    assert book.main([], copy) == 0
    assert not orphan.exists()


def result(ours, theirs, **more):
    return Result("op", "", "cuda", "bf16", "case", "native", 10**6, 0.0, [ours] * 6, [theirs] * 6, **more)


@pytest.mark.parametrize(
    ("theirs", "verdict"), [(300.0, "3.00 [3.00, 3.00] | faster"), (50.0, "**slower**"), (100.0, "even")]
)
def test_losses_are_shown_beside_wins(theirs, verdict):
    run = Run("2026-11-21", {"gpu": "NVIDIA H200"}, {"cuda": 2e10}, results=[result(100.0, theirs)])
    page = book.book({"h200": run})
    assert "| cuda bf16 case | native | 100 us |" in page
    assert verdict in page
    assert "| 10.0 GB/s | 50% |" in page  # 1 MB in 100 us


def test_a_product_is_compared_with_one_of_its_dtype():
    product = replace(result(100.0, 100.0), moved=0, flops=10**9)
    speeds = {"cuda fp32": 1e13, "cuda bf16": 2e13}
    run = Run("2026-11-21", {"gpu": "NVIDIA H200"}, gemm_speeds=speeds, results=[product])
    assert "| 10 TFLOP/s | 50% |" in book.book({"h200": run})


def test_a_training_step_short_of_its_aim_is_named():
    slow, fast = replace(result(100.0, 149.0), op="train"), replace(result(100.0, 150.0), op="train", case="fast")
    page = book.book({"h200": Run("2026-11-21", {"gpu": "NVIDIA H200"}, results=[slow, fast])})
    assert "2 faster, 0 even, 0 slower. Short of 1.5 times: case.\n" in page


def test_random_inputs():
    sizes = [(3,), (2**20 + 5,), (2, 4)]
    tensors = Setting(Place("cpu", 1), "bf16", Case("case", tuple(sizes))).tensors()
    assert [tuple(tensor.shape) for tensor in tensors] == sizes
    assert all(tensor.dtype == torch.bfloat16 and tensor.unique().numel() > 2 for tensor in tensors)
    assert tensors[1][-5:].tolist() == tensors[1][:5].tolist()


def test_what_was_counted_stands_beside_what_was_measured():
    counts = {"ours": {"peak memory": 14 * 10**9}, "theirs": {"peak memory": 16 * 10**9}}
    step = Result(
        "step", "", "cuda", "bf16", "1x1e9", "native", 28 * 10**9, 0.0, [6500.0] * 6, [11000.0] * 6, "torch.amp fused",
        counts=counts,
    )  # fmt: skip
    page = book.book({"h200": Run("2026-11-21", {"gpu": "NVIDIA H200"}, results=[step])})
    assert "| 1.69 [1.69, 1.69] | faster | 1.71 | 14 GB / 16 GB |" in page


@pytest.mark.parametrize("failing", [0, 1])
def test_a_turn_that_fails_is_not_forgotten(monkeypatch, capsys, tmp_path, failing):
    """Nor what the others found."""
    monkeypatch.chdir(tmp_path)  # for the picture
    turns = []

    def run_one(benchmark, run, seconds, builds):
        turns.append(benchmark.name)
        if len(turns) - 1 == failing:
            raise RuntimeError("no luck")
        return measuring.run_one(benchmark, run, seconds=0, builds=1)

    monkeypatch.setattr(command, "run_one", run_one)
    monkeypatch.setattr(command, "QUICK_SECONDS", math.inf)  # a busy machine's minute may be over before
    arguments = argparse.ArgumentParser()
    command.add_arguments(arguments)
    code = command.run(arguments.parse_args(["--quick", "--only", "unscale_"]), pytest.fail)
    (name,) = set(turns)
    said = capsys.readouterr().out
    assert (code, len(turns)) == (1, 4)
    assert f"left out: {name}: failed, RuntimeError: no luck" in said
    assert said.count(name) == 2  # in the table, too


@pytest.mark.parametrize(
    ("theirs", "says"),
    [
        ([300.0] * 9, "AdamW's unscaled, clipped step in bf16 is 3.00 times as fast as torch's, in 88% of its memory"),
        ([200.0, 300.0, 400.0] * 3, "is at least 2.00 times as fast as torch's"),  # whose interval is wide
        ([99.0, 100.0, 101.0] * 3, "in bf16 is as fast as torch's"),
        ([50.0] * 9, "is 0.50 times as fast as torch's"),
        (
            [30.0, 50.0, 70.0] * 3,
            "is at most 0.70 times as fast as torch's, in 88% of its memory; the samples are wide",
        ),
    ],
)
def test_the_headline_says_no_more_than_was_measured(theirs, says):
    counts = {"ours": {"peak memory": 14}, "theirs": {"peak memory": 16}}
    step = replace(result(100.0, 100.0), op="step", ours_us=[100.0] * 9, torch_us=theirs, counts=counts)
    assert says in show.headline(Run("2026-11-21", {"gpu": "NVIDIA H200"}, results=[result(1.0, 1.0), step]))


def test_the_headline_gives_no_figure_where_other_programs_were_at_work():
    counts = {"ours": {"peak memory": 14}, "theirs": {"peak memory": 16}}
    step = replace(result(100.0, 1591.0), op="step", waited=0.2, counts=counts)
    said = show.headline(Run("2026-11-21", {"gpu": "NVIDIA H200"}, results=[step]))
    assert said.startswith("AdamW's unscaled, clipped step in bf16 runs in 88% of its memory; how fast")
    assert said.endswith("can't be told, for other programs were at work")
    assert "15" not in said


def test_the_headline_of_single_ops():
    found = [result(1.0, theirs) for theirs in (0.5, 1.0, 2.0, 3.0)]
    run = Run("2026-11-21", {"gpu": "NVIDIA H200"}, results=found)
    assert show.headline(run) == "2 of 4 cases are faster than torch, 1 slower"
    run.results[0] = replace(found[0], waited=0.2)
    assert show.headline(run) == "2 of 4 cases are faster than torch, 1 slower; 1 of them are in doubt"


@pytest.mark.parametrize("told", [None, "1"])
def test_one_thread_is_measured_and_as_many_as_torch_takes(told):
    """By OMP_NUM_THREADS, where that is set."""
    code = "import torch; from mpkernels.bench.settings import places; print(torch.get_num_threads(), *places())"
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    environment |= {"CUDA_VISIBLE_DEVICES": ""} | ({"OMP_NUM_THREADS": told} if told else {})
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    threads, *places = done.stdout.split()
    assert places == [f"cpu-{each}" for each in sorted({1, int(threads)})]
    assert threads == (told or threads)


@pytest.mark.parametrize("case", [case.name for case in cases.STEPS])
def test_each_number_of_threads_is_measured_with_a_scaler_and_without(monkeypatch, case):
    monkeypatch.setattr(cases, "places", lambda: [Place("cpu", 1), Place("cpu", 2)])
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
    setting = Setting(Place("cpu", 1), "fp32", Case("tiny", ((300,), (40,))))
    pair = steps.compare_imports(setting, share)
    runs = pair.ours(), pair.theirs()
    first = [torch.cat([param.grad for param in params]).norm().item() for params in sides]
    for number in range(4):  # the first clips none
        for run in runs:
            run()
        norms = [torch.cat([param.grad for param in params]).norm().item() for params in sides]
        assert norms == pytest.approx([norm * share**number for norm in first], rel=1e-5)
    assert pair.moved == 340 * (32 if share == 1 else 40)


def test_readme_shows_one_thread_beside_all():
    def step(place, theirs, **more):
        words = {"op": "step", "place": place, "baseline": "torch.amp fused"} | more
        return replace(result(100.0, theirs), **words)

    found = [
        step("cpu-1", 150.0),
        step("cpu-16", 250.0),
        step("cpu-1", 110.0, variant="imports", baseline="torch fused"),
    ]
    run = Run("2026-11-25", {"gpu": None, "cpu": "Abacus", "torch": "2.13.0"}, results=found)
    shown = book._front("abacus", run)
    assert front.figures([shown])[0].startswith("  * **2.50**; one thread **1.50**, on Abacus, 16 cores")
    rows = dict(front.rows([shown])[1])
    assert rows["the same calls, only the imports changed"] == "not measured; one thread **1.10**"
    alone = book._front("abacus", replace(run, results=found[:1]))
    assert front.figures([alone])[0].startswith("  * **1.50**, on Abacus, 1 cores")
