"""A run of all files leaves tests out, and says how many; ``--all`` and named files don't."""

import itertools
import os
import subprocess
import sys

import pytest

from tests import ROOT
from tests.quick import meeting

PARAMETERS = {"kernel": "abcd", "dtype": (16, 32, 64), "size": (0, 1, 7)}
COMBINATIONS = [dict(zip(PARAMETERS, it, strict=True)) for it in itertools.product(*PARAMETERS.values())]


@pytest.mark.parametrize(("count", "most"), [(1, 4), (2, 13), (3, 36)])
def test_all_values_that_meet_meet_in_what_is_kept(count, most):
    kept = meeting(count, COMBINATIONS, dict)
    for names in itertools.combinations(PARAMETERS, count):
        assert {tuple(it[name] for name in names) for it in kept} == set(itertools.product(*map(PARAMETERS.get, names)))
    assert len(kept) <= most
    assert kept == meeting(count, COMBINATIONS, dict)


def test_without_parameters_one_is_kept():
    assert meeting(2, [{}], dict) == [{}]


def test_values_that_never_meet_are_no_pair():
    refused = [it for it in COMBINATIONS if (it["kernel"], it["dtype"]) != ("a", 16)]
    assert all(it in refused for it in meeting(2, refused, dict))


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
CONFTEST = """
from tests.quick import *
from tests.quick import add_option as pytest_addoption
def pytest_terminal_summary(terminalreporter, config):
    for line in lines_on(config): print(line)
"""


@pytest.mark.parametrize(
    ("arguments", "ran"),
    [(("-n", "2"), 13), (("tests",), 13), (("--all",), 38), (("tests/one/test_it.py",), 38)],
    ids=str,
)
def test_what_a_run_leaves_out(tmp_path, arguments, ran):
    folder = tmp_path / "tests" / "one"
    folder.mkdir(parents=True)
    (folder / "test_it.py").write_text(TESTS)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\ntestpaths = tests\nmarkers =\n  exhaustive\n  each_value_once\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert f"{ran} passed" in done.stdout, done.stdout + done.stderr
    assert (f"{38 - ran} more with --all: {38 - ran} in tests/one" in done.stdout) == (ran < 38)
