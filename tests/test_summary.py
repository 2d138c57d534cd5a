"""The test command says how long it takes, and which kernels it has tested."""

import copy
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from tests import ROOT
from tests.summary import CollectionTime, count_up, lines_of, pytest_report_header

TEST = "tests/ops/linear/test_linear_act.py"


def report(target, longrepr=None):
    return SimpleNamespace(user_properties=[("target", target)] if target else [], longrepr=longrepr)


def skipped(target, reason="torch sees no CUDA device"):
    return "skipped", report(target, ("tests/conftest.py", 7, f"Skipped: {reason}"))


def test_each_target_has_a_line():
    outcomes = ["passed"] * 3 + ["failed"] + ["error"]
    reports = [(outcome, report("cpu-native")) for outcome in outcomes]
    reports += [skipped("cpu-native", "has no such layout"), skipped("cuda-native"), skipped("cuda-native")]
    assert lines_of([*reports, ("passed", report(None))]) == [
        "cpu-native      3 passed, 1 failed, 1 error, 1 skipped",
        "cuda-native     did not run here: torch sees no CUDA device (2 tests)",
        "No kernel ran on a GPU; docs/proof.md says what stands in for one.",
        "1 skipped: has no such layout",
    ]


def test_no_stand_in_is_mentioned_if_a_gpu_was_there():
    assert lines_of([("passed", report("cuda-triton"))]) == ["cuda-triton     1 passed"]


def test_tests_without_a_target_have_a_line_for_each_cause_of_a_skip():
    assert lines_of([("passed", report(None))]) == []
    skips = [skipped(None, "needs timm"), *[skipped(None, "needs gloo")] * 2]
    assert lines_of(skips) == ["2 skipped: needs gloo", "1 skipped: needs timm"]


def test_a_file_that_could_not_be_read_has_no_line():
    """pytest reports it as an error, without the properties of a test."""
    assert lines_of([("error", SimpleNamespace(longrepr="SyntaxError"))]) == []


def test_what_takes_long_counts_up_until_it_has_ended(monkeypatch):
    said, has_said = [], threading.Event()

    def say(text):
        said.append(text)
        if len(said) == 2:
            has_said.set()

    ended = count_up("it lasts", say, seconds=0.01)
    assert has_said.wait(60)
    ended.set()
    assert said[0] == "tests: it lasts, 0 s so far"
    monkeypatch.setattr("tests.summary.count_up", lambda what, say: threading.Event())
    collection = CollectionTime(SimpleNamespace(pluginmanager=SimpleNamespace(get_plugin=None)))
    assert not collection.ended.is_set()
    collection.pytest_runtest_logstart()
    assert collection.ended.is_set()


@pytest.mark.exhaustive
def test_workers_tell_what_they_tested():
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "1", TEST]
    command += ["-k", "test_overflow_becomes_inf and (reference or cuda-native)"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.partition("which kernels these tests ran")[2].splitlines()[1:]
    assert lines[0] == "cpu-reference   1 passed"
    assert lines[1].startswith("cuda-native     ")


@pytest.mark.parametrize(
    ("names_one", "is_all", "text"),
    [(False, False, "of every kernel"), (False, True, "all tests"), (True, False, None)],
)
def test_a_run_of_all_files_says_how_long_it_takes(pytestconfig, names_one, is_all, text):
    config = copy.copy(pytestconfig)
    config.args = ["tests/test_summary.py"] if names_one else config.getini("testpaths")
    config.option = copy.copy(config.option)
    config.option.all = is_all
    header = pytest_report_header(config)
    assert header is None if text is None else text in header and "minutes on two quiet cores" in header
