"""The script for machines with a GPU: rehearsed on the CPU, and led through slots by stand-ins that count the time."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import __main__ as command
from benchmarks import cases
from mpkernels.bench import cases as shipped
from mpkernels.bench.settings import Place
from tests import ROOT
from tests.bench.gpu_slot import SCRIPT, Slot

pytestmark = pytest.mark.exhaustive
PARTS = ["doctor", "step", "linear", "train", "test", "sanitize", "tuned"]
FILES = {"build.txt", "doctor.txt", "parts.txt", "results.json", "rule.txt", "sanitize.txt", "test.txt"}


@pytest.fixture
def gpu_sh(monkeypatch):
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin")
    return lambda *words: subprocess.run(["bash", SCRIPT, *map(str, words)], capture_output=True, text=True)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([], "OUTDIR is missing"),
        (["out", "--part", "sleep"], "there is no part 'sleep'"),
        (["out", "--part"], "there is no part ''"),
        (["out", "--from", "nowhere"], "there is no folder 'nowhere'"),
        (["out", "--fast"], "there is no option --fast"),
        (["out", "other"], "one OUTDIR, got out and other"),
        (["/proc/nowhere"], "/proc/nowhere can't be written"),
    ],
    ids=lambda it: " ".join(it) if isinstance(it, list) else "",
)
def test_bad_arguments(gpu_sh, words, complaint):
    done = gpu_sh(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert complaint in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_rehearsal(gpu_sh, tmp_path):
    out = tmp_path / "out"
    done = gpu_sh(out, "--rehearse")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split()[:2] for line in (out / "parts.txt").read_text().splitlines()] == [[it, "done"] for it in PARTS]
    assert {path.name for path in out.iterdir()} == FILES
    assert "PASSED tests/" in (out / "test.txt").read_text()
    assert len(json.loads((out / "results.json").read_text())["pairs"]) == 4


def test_a_rehearsal_differs_at_the_device_boundary_alone():
    settings, _, below = SCRIPT.read_text().partition("# The device boundary")[2].partition("\nfi\n")
    assert "compute-sanitizer" in settings
    for word in ("rehearse", "nvidia-smi", "compute-sanitizer", "cuda-", "*cuda"):
        assert word not in below


def test_names_of_tests_that_need_a_gpu_are_known():
    selected = SCRIPT.read_text().partition('selected="')[2].partition('"\n')[0]
    selected += SCRIPT.read_text().partition('selected+="')[2].partition('"\n')[0]
    tests = "\n".join(f"{path.name}\n{path.read_text()}" for path in (ROOT / "tests").rglob("test_*.py"))
    assert all(it in tests for it in selected.split(" or ")[2:])


@pytest.fixture
def slot(tmp_path):
    return Slot(tmp_path)


def test_what_is_quick_is_done_in_one_call(slot):
    code, _, log = slot.call()
    assert code == 0
    assert [(part, how) for part, how, *_ in slot.parts] == [(part, "done") for part in PARTS]
    kinds = ("nvidia-smi", "setup.py", "mpkernels doctor", "step*", "linear_act*cuda* 8192x", "train*cuda*gpt2")
    kinds += ("-m pytest", "memcheck", "racecheck", "synccheck", "linear_act*cuda*compile")
    first = [next(i for i, it in enumerate(log) if kind in it) for kind in kinds]
    assert first == sorted(first)
    assert all(it.startswith("uncached ") == ("compute-sanitizer" in it) for it in log)
    assert all("--kernel-name-exclude kns=at6native" in it for it in log if "compute-sanitizer" in it)
    assert "compile" in log[-1]  # the baselines that are tuned come last, and alone


def test_a_library_that_loads_is_not_built_again(slot):
    assert any("setup.py" in it for it in slot.call("--part", "doctor")[2])
    assert not any("setup.py" in it for it in slot.call("--part", "doctor", out=slot.folder / "another")[2])


@pytest.mark.parametrize(
    ("lacks", "required"),
    [
        ([], "cuda-native,cuda-triton"),
        (["triton"], "cuda-native"),
        (["native"], "cuda-triton"),
        (["native", "triton"], ""),
    ],
    ids=str,
)
def test_kernels_that_cannot_run_there_are_not_demanded(slot, lacks, required):
    """A library that loads, but holds nothing for this chip, is built once more."""
    (slot.folder / "library").touch()
    for it in lacks:
        (slot.folder / f"lacks_{it}").touch()
    log = slot.call("--part", "test")[2]
    tests = [shlex.split(it) for it in log if "-m pytest" in it]
    assert tests
    assert all(f"--require={required}" in it for it in tests)
    assert any("setup.py" in it for it in log) == ("native" in lacks)


def test_whether_kernels_run_is_tried():
    """On this machine, which has no GPU."""
    script = SCRIPT.read_text()
    launches = re.search(r"^launches\(\) \{.*?^\}\n", script, re.DOTALL | re.MULTILINE)[0]
    for device, kernel, runs in (("cpu", "native", True), ("cpu", "reference", True), ("meta", "native", False)):
        command = f"device={device}\n{launches}launches {kernel}"
        environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        done = subprocess.run(["bash", "-c", command], cwd=ROOT, env=environment, capture_output=True, text=True)
        assert (done.returncode == 0) == runs, done.stderr
        assert (f"{kernel}: runs" in done.stdout) == runs


def test_what_needs_a_missing_package_is_left_out(slot):
    (slot.folder / "lacks_expecttest").touch()
    log = [it for it in slot.call("--part", "test")[2] if "-m pytest" in it]
    assert log
    assert all(") and not test_opcheck tests/" in it for it in log)


def test_three_calls_give_each_part_its_share_of_25_minutes(slot):
    """Though every command takes longer than there is."""
    slot.take(("setup.py", 90, 0), ("python3", 9998, 0), ("sanitizer", 9998, 0))
    for _ in range(3):
        code, took, _ = slot.call()
        assert code == 1
        assert took <= 540
    spent = dict.fromkeys(PARTS, 0)
    for part, *how, taken, _ in slot.parts:
        assert how == ["cut", "off", "after"]
        assert int(taken) <= 480
        spent[part] += int(taken)
        if sum(spent.values()) == 25 * 60 - 90:
            break
    shares = dict(re.findall(r"\[(\w+)\]=(\d+)", SCRIPT.read_text()))
    assert spent == {part: int(shares[part]) for part in PARTS}


def test_what_is_left_goes_to_what_was_cut_off(slot):
    slot.take(("step*", 350, 0))
    assert slot.call()[0] == 1
    assert [it[:2] for it in slot.parts[:-1]] == [[it, "cut" if it == "step" else "done"] for it in PARTS]
    assert slot.parts[-1] == ["step", "cut", "off", "after", "240", "s"]
    slot.take()
    code, _, log = slot.call()
    assert code == 0
    assert [it[:2] for it in slot.parts][len(PARTS) :] == [["step", "cut"], ["step", "done"]]
    assert sum("-m benchmarks --resume" in it for it in log) == 1


def test_the_next_machine_goes_on(slot):
    slot.take(("-m benchmarks --resume --json", 300, 0))
    slot.call()
    assert slot.call("--from", str(slot.out), out=slot.folder / "next")[0] == 1
    before, after = ((slot.folder / it / "parts.txt").read_text() for it in ("out", "next"))
    assert after.startswith(before)
    assert len(after) > len(before)


def test_what_failed_is_tried_again_only_when_asked_for(slot):
    slot.take(("doctor", 5, 1), ("memcheck", 5, 9), ("tests/ops/test_huge.py", 5, 1))
    assert slot.call()[0] == 1
    failed = ["doctor", "test", "sanitize"]
    assert [part for part, how, *_ in slot.parts if how == "failed"] == failed
    slot.take()
    code, took, log = slot.call()
    assert (code, took) == (1, 0)
    assert not any("-m pytest" in it or "doctor" in it for it in log)
    for part, words in zip(failed, ("doctor", "tests/ops/test_huge.py", "memcheck"), strict=True):
        log = slot.call("--part", part)[2]
        assert sum(words in it for it in log) == 1
        assert not any("test_ops.py" in it or "racecheck" in it for it in log)  # they passed
    assert slot.call()[0] == 0


def test_a_process_that_lost_the_device_is_followed_by_another(slot):
    """Others follow as long as one gets further."""
    (slot.folder / "out").mkdir()
    (slot.folder / "out" / "results.json").touch()
    slot.take(("step*", 5, 3))
    log = slot.call()[2]
    assert sum("step*" in it for it in log) == 3
    assert next(it for it in slot.parts if it[0] == "step")[:3] == ["step", "failed", "(3)"]


def test_each_case_on_a_gpu_belongs_to_one_part(slot, monkeypatch):
    for module in (cases, shipped):
        monkeypatch.setattr(module, "places", lambda: [Place("cuda", 1)])
    slot.call()
    lines = (slot.folder / "quoted").read_text().splitlines()
    words = [shlex.split(it.partition("'benchmarks'")[2]) for it in lines if "'benchmarks'" in it]
    parts = [command.chosen(command.parser().parse_args(it)) for it in words]
    assert len(parts) == 4
    assert sorted(it.name for part in parts for it in part) == sorted(it.name for it in cases.all_cases())
    briefly = command.parser().parse_args(words[0]).only[:5]
    ops = {it.op for it in command.select(cases.all_cases(), briefly)}
    assert ops == {"step", "update_scale_", "overflow_", "grad_stats", "unscale_"}
