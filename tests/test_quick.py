"""A run of all files leaves tests out, and says how many; ``--all`` and named files don't."""

import itertools
import os
import re
import subprocess
import sys

import pytest

from tests import ROOT
from tests.quick import BEGINS_FIRST, EACH_ONCE, EXHAUSTIVE, covering

PARAMETERS = {"kernel": "abcd", "dtype": (16, 32, 64), "size": (0, 1, 7)}
COMBINATIONS = [dict(zip(PARAMETERS, it, strict=True)) for it in itertools.product(*PARAMETERS.values())]


@pytest.mark.parametrize(("count", "most"), [(1, 4), (2, 13), (3, 36)])
def test_values_that_occur_together_do_so_in_a_kept_combination(count, most):
    kept = covering(count, COMBINATIONS, dict)
    for names in itertools.combinations(PARAMETERS, count):
        assert {tuple(it[name] for name in names) for it in kept} == set(itertools.product(*map(PARAMETERS.get, names)))
    assert len(kept) <= most
    assert kept == covering(count, COMBINATIONS, dict)


def test_a_test_without_parameters_is_kept():
    assert covering(2, [{}], dict) == [{}]


def test_values_that_never_occur_together_are_not_needed_together():
    possible = [it for it in COMBINATIONS if (it["kernel"], it["dtype"]) != ("a", 16)]
    assert all(it in possible for it in covering(2, possible, dict))


TESTS = """
import pytest

@pytest.mark.parametrize("a", range(3))
@pytest.mark.parametrize("b", range(3))
@pytest.mark.parametrize("c", range(3))
def test_pairs(a, b, c): pass

@pytest.mark.each_value_once
@pytest.mark.parametrize("a", range(3))
@pytest.mark.parametrize("b", range(3))
def test_values(a, b): pass

@pytest.mark.parametrize("a", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_marked(a): pass
"""
FILES = {"a": "def test_it(): pass", "b": "def test_1(): pass\ndef test_2(): pass", "long": "def test_it(): pass"}
FILES["long"] = "import pytest\npytestmark = pytest.mark.begins_first\n" + FILES["long"]
CONFTEST = """
from tests.quick import *
from tests.quick import add_option as pytest_addoption
def pytest_terminal_summary(terminalreporter, config):
    for line in lines_on(config): print(line)
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("arguments", "ran"),
    [(("-n", "2"), 13), (("tests",), 13), (("--all",), 38), (("tests/one/test_it.py",), 38)],
    ids=str,
)
def test_only_a_run_of_all_files_leaves_tests_out(tmp_path, arguments, ran):
    output = run_pytest(tmp_path, {"it": TESTS}, *arguments)
    assert f"{ran} passed" in output
    assert (f"{38 - ran} more with --all: {38 - ran} in tests/one" in output) == (ran < 38)


@pytest.mark.exhaustive
def test_workers_begin_with_marked_files_and_then_the_fullest(tmp_path):
    output = run_pytest(tmp_path, FILES, "-n", "1", "--dist", "loadfile", "-v")
    assert re.findall(r"PASSED tests/one/test_(\w+).py", output) == ["long", "b", "b", "a"]


def run_pytest(root, files, *arguments):
    folder = root / "tests" / "one"
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(text)
    (root / "conftest.py").write_text(CONFTEST)
    markers = "".join(f"\n  {it}" for it in (EXHAUSTIVE, EACH_ONCE, BEGINS_FIRST))
    (root / "pytest.ini").write_text(f"[pytest]\ntestpaths = tests\nmarkers ={markers}\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
