"""The command with patterns, and with cases that fail, hang or break the device."""

import argparse
from types import SimpleNamespace

import pytest
import torch

from benchmarks import __main__ as benchmarks
from benchmarks import conftest
from benchmarks.cases import _single_ops
from benchmarks.cases import all_cases as all_of_checkout
from benchmarks.raw_samples import read
from mpkernels.bench import cases, command
from mpkernels.bench.results import Result
from mpkernels.bench.settings import Place


@pytest.fixture
def measure_all(monkeypatch, tmp_path):
    """Run ``python -m benchmarks`` with another ``run_one``; return its exit status, and the file of results."""

    def measure_all(run_one, *words):
        monkeypatch.setattr(benchmarks, "run_one", run_one)
        path = tmp_path / "results.json"
        code = benchmarks.main(["--only", *words, "--json", str(path), "--resume"])
        return code, read(path)

    return measure_all


def test_what_failed_comes_last_when_it_is_resumed(measure_all):
    patterns = "update_scale_ cpu-1", "overflow_ skipped cpu-1 fp32 1000x5k"
    names = [it.name for it in cases.select(all_of_checkout(), [*patterns])]
    tried = []

    def run_one(benchmark, session, seconds):
        tried.append(benchmark.name)
        raise RuntimeError("no luck") if benchmark.name == names[0] else KeyboardInterrupt

    assert measure_all(run_one, *patterns)[0] == command.STOPPED
    code, run = measure_all(run_one, *patterns)
    assert tried == [names[0], names[1], names[1]]
    assert (code, run.skipped) == (command.STOPPED, {names[0]: "failed, RuntimeError: no luck"})


def test_a_case_that_ends_the_process_leaves_a_note(measure_all, tmp_path):
    def run_one(benchmark, session, seconds):
        assert read(tmp_path / "results.json").skipped == {benchmark.name: "failed, it did not end"}
        raise KeyboardInterrupt

    assert measure_all(run_one, "update_scale_")[1].skipped == {}


def test_a_process_that_lost_the_device_ends(measure_all, monkeypatch):
    def lost():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def run_one(benchmark, session, seconds):
        tried.append(benchmark.name)
        lost()

    tried = []
    monkeypatch.setattr(benchmarks, "all_cases", lambda: on_cuda)
    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    on_cuda = [*_single_ops(Place("cuda", 1))]
    code, run = measure_all(run_one, "update_scale_", "overflow_")
    assert (code, tried) == (benchmarks.LOST, [*run.skipped])
    assert len(tried) == 1


def test_patterns_choose_and_order_and_leave_out():
    def chosen(*words):
        return [it.name for it in benchmarks.chosen(benchmarks.parser().parse_args(words))]

    def ops(*patterns):
        return [name.split()[0] for name in chosen("--only", *patterns)]

    assert set(ops("update_scale_", "overflow_")) == {"update_scale_", "overflow_"}
    assert ops("update_scale_", "overflow_")[0] == ops("update_scale_", "update*")[0] == "update_scale_"
    assert len(ops("update_scale_", "update*")) == len(ops("update_scale_"))
    assert "compile" in " ".join(chosen("--only", "train"))
    assert "compile" not in " ".join(chosen("--only", "train", "--without", "compile"))


@pytest.fixture
def quick(monkeypatch, capsys):
    """Run ``bench --quick`` with a clock that only turns advance, each by so many seconds. Return the names of the
    turns, the seconds, and the output."""

    def quick(seconds_of):
        now, turns = [0.0], []

        def run_one(benchmark, seconds, builds):
            turns.append(benchmark.name)
            now[0] += seconds_of(benchmark)
            return Result(benchmark.name, "", "cpu-1", "", "", "", 0, 0.0, [1.0] * 6, [1.0] * 6)

        monkeypatch.setattr(command, "run_one", run_one)
        monkeypatch.setattr(command, "perf_counter", lambda: now[0])
        arguments = argparse.ArgumentParser()
        command.add_arguments(arguments)
        command.run(arguments.parse_args(["--quick"]), pytest.fail)
        return turns, now[0], capsys.readouterr().out

    return quick


@pytest.mark.parametrize("seconds", [0.1, 1.5, 5.0, 10.0, 30.0])
def test_quick_ends_within_its_minute_and_says_what_it_left_out(quick, seconds):
    turns, spent, output = quick(lambda benchmark: seconds)
    assert spent <= command.QUICK_SECONDS < 60
    assert len({*turns}) >= min(5, command.QUICK_SECONDS // seconds)
    names = [it.name for it in cases.quick(cases.all_cases())]
    left_out = [name for name in names if f"left out: {name}: the minute of --quick is over" in output]
    assert {*turns}.isdisjoint(left_out)
    assert [*dict.fromkeys(turns), *left_out] == names


def test_quick_goes_on_with_what_still_fits(quick):
    """A slow case gets one turn, and the other cases get all of theirs."""
    turns, _, _ = quick(lambda benchmark: 26.0 if benchmark.op == "grad_stats" else 0.1)
    counts = {turns.count(name) for name in turns if not name.startswith("grad_stats")}
    assert counts == {command.QUICK_TURNS}
    assert sum(name.startswith("grad_stats") for name in turns) == 1


def test_quick_begins_with_the_optimizer_and_ends_with_single_ops():
    chosen = cases.quick(cases.all_cases())
    ops = [it.op for it in chosen]
    assert len(chosen) == len(cases.QUICK)
    assert ops[:5] == ["step"] * 5
    assert [it.baseline for it in chosen[:3]] == [cases.WITHOUT_SCALER, cases.BEST, cases.DEFAULT]
    assert set(ops[-2:]) == {"grad_stats", "unscale_"}


def test_pytest_says_how_long_its_cases_take():
    config = SimpleNamespace(getoption={"benchmark_disable": False, "benchmark_max_time": "2.0"}.get)
    [case, *_] = all_of_checkout()
    measured, missing = (
        SimpleNamespace(fixturenames=["case"], callspec=SimpleNamespace(params={"case": case._replace(missing=why)}))
        for why in ("", "no GPU")
    )
    line = conftest.pytest_report_collectionfinish(config, [*[measured] * 60, missing, SimpleNamespace()])
    assert line.startswith("60 cases, at least 4 minutes, and several times as long on few cores")
    assert conftest.pytest_report_collectionfinish(config, [missing]) == []
