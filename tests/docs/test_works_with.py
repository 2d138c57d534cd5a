"""docs/works_with.md names tests that exist and that CI runs, and the versions that CI installs."""

import ast
import re
import shlex
from typing import NamedTuple

import pytest

from tests import ROOT
from tests.docs.test_examples import EXAMPLES, NEEDS

PAGE = (ROOT / "docs" / "works_with.md").read_text()
CI = (ROOT / ".ci" / "run").read_text().replace("\\\n", " ")
LINK = re.compile(r"\[([\w.]+)\]\(\.\./(tests/[\w/]+\.py)\)(?:`\[(\w+)\]`)?(\\\*)?")
ON_THE_STANDIN = ("tests/cuda/", "tests/proof/standin/")


class Named(NamedTuple):
    """A test, or a file of tests, as the page names it. star: the page says that it runs by ``--all`` only."""

    name: str
    file: str
    parameter: str
    star: str


class Stage(NamedTuple):
    """One call of pytest by CI. expression: what ``-k`` keeps."""

    paths: list[str]
    expression: str
    has_libraries: bool
    is_for_all: bool


NAMED = [Named(*found) for found in LINK.findall(PAGE)]


def stages():
    """Return CI's calls of pytest: README's, typed as it stands, and those of .ci/run."""
    yield Stage([], "", has_libraries=False, is_for_all=False)
    always, _, before_a_release = CI.partition("[[ $all ]] || exit 0")
    for text, is_for_all in ((always, False), (before_a_release, True)):
        for words in map(shlex.split, re.findall(r"python -m pytest (.*)", text)):
            expression = words[words.index("-k") + 1] if "-k" in words else ""
            paths = [word for word in words if word.startswith("tests/")]
            yield Stage(paths, expression, "--require=integrations" in words, is_for_all)


def keeps(expression, name):
    """Return what pytest's ``-k`` decides. Its words are parts of names, joined by and, or, not."""
    words = re.sub(r"\b(?!(?:and|or|not)\b)\w+", lambda word: str(word[0] in name), expression)
    return eval(words) if words else True


def function_of(named):
    tree = ast.parse((ROOT / named.file).read_text())
    return next((it for it in tree.body if isinstance(it, ast.FunctionDef) and it.name == named.name), None)


def is_run(named, with_all):
    """Return whether CI runs the test, by ``.ci/run --all`` or without."""
    if named.file.startswith(ON_THE_STANDIN):
        return "python -m tests.proof.standin" in CI
    function = function_of(named)
    is_exhaustive = function is not None and any("exhaustive" in ast.unparse(it) for it in function.decorator_list)
    needs_libraries = "libraries.need()" in (ROOT / named.file).read_text() or named.parameter in NEEDS
    for stage in stages():
        asked_for = not stage.paths or named.file.startswith(tuple(stage.paths))
        left_out = ((is_exhaustive and not stage.paths) or stage.is_for_all) and not with_all
        kept = keeps(stage.expression, f"{named.file}::{named.name}[{named.parameter}]")
        if asked_for and kept and not left_out and (stage.has_libraries or not needs_libraries):
            return True
    return False


@pytest.mark.parametrize("named", NAMED, ids=lambda named: f"{named.file}-{named.name}-{named.parameter}")
def test_a_named_test_exists_and_ci_runs_it_when_the_page_says(named):
    assert named.name == (ROOT / named.file).name or function_of(named)
    assert not named.parameter or (EXAMPLES / f"{named.parameter}.py").exists()
    assert is_run(named, with_all=True)
    assert is_run(named, with_all=False) == (not named.star)


def test_a_test_that_no_stage_runs_is_noticed():
    wheel = Named("test_one_wheel_serves_every_python", "tests/building/test_build.py", "", "")
    assert (is_run(wheel, with_all=False), is_run(wheel, with_all=True)) == (False, True)
    needs_a_library = Named("test_an_example_runs", "tests/docs/test_examples.py", "huggingface_trainer", "")
    assert is_run(needs_a_library, with_all=False)  # by the stage that has the libraries, as its -k says
    assert not keeps("integration or fuse_gpt2", "test_examples.py::test_an_example_runs[huggingface_trainer]")
    assert keeps("triton and not slow", "test_triton")


def test_every_row_is_shown_or_untested():
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and "---" not in line]
    assert len(rows) > 40
    words = ("](", "untested", "not served", "on each change", "\\*", "shown by", "has run on it")
    assert [row for row in rows if not any(word in row for word in words)] == []


def test_every_chip_that_is_compiled_for_has_a_row():
    compiled = set(re.findall(r"\bsm_(\d+)\b", (ROOT / "tests/proof/gate/table.json").read_text()))
    assert compiled == {"75", "80", "90", "100", "120"}
    for chip in compiled:
        assert re.search(rf"^\| {chip[:-1]}\.{chip[-1]}: .* \| (?:as for 8.0|compiled)", PAGE, re.MULTILINE)


def test_versions_tried_by_hand_are_in_the_log_and_nothing_failed():
    rows = re.findall(r"^\| (Python .*) \| \[a CPU\]", PAGE, re.MULTILINE)
    log = (ROOT / "benchmarks/results/versions/cpu-2026-11-26.txt").read_text()
    tried = {}
    for part in log.split("\n== ")[1:]:
        python, torch, cuda, triton = re.match(
            r"Python (\d+\.\d+)\S*, torch (\S+)\+cu(\d+), Triton (\S+)", part
        ).groups()
        tried[f"Python {python}, torch {torch} for CUDA {cuda[:2]}.{cuda[2:]}, Triton {triton}"] = part
    assert rows == [*tried]
    for part in tried.values():
        assert "all 13 kernels agree with the reference" in part
        assert f"{re.search('([0-9]+) passed, ', part)[1]} tests of steps" in PAGE
        assert " failed" not in part


def test_versions_are_those_that_ci_installs():
    pinned = dict(re.findall(r"^([\w-]+)==(.+)$", (ROOT / ".ci" / "constraints.txt").read_text(), re.MULTILINE))
    named = re.findall(r"^\|[^|]*\| ([a-z][\w-]+) ([\d.]+)[ ,|]", PAGE, re.MULTILINE)
    assert {name for name, _ in named} >= {"transformers", "accelerate", "lightning", "peft", "torchao"}
    assert [(name, version) for name, version in named if pinned.get(name, version) != version] == []
    assert f"Triton {pinned['triton']} |" in PAGE
    readmes_versions = re.findall(r"torch==([\d.]+)", (ROOT / "README.md").read_text())
    assert [it for it in readmes_versions if f"torch {it} for CPUs" not in PAGE] == []
    standin = (ROOT / "tests/proof/standin/environment.py").read_text()
    assert f"torch {re.search('TORCH = .([0-9.]+)', standin)[1]} for CUDA" in PAGE
    for older in re.findall(r"(?:triton|transformers)==([\d.]+)", CI):
        assert older in PAGE
