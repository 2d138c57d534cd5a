"""The examples that a newcomer reads first, as they are run."""

import ast
import re
import subprocess
import sys

import pytest

from tests import ROOT

EXAMPLES = ROOT / "examples"


def last_loss(path):
    run = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=True)
    assert run.stderr == ""
    return [float(loss) for loss in re.findall(r"loss (\S+),", run.stdout)][-1]


def without_imports(path):
    docstring, *body = ast.parse(path.read_text()).body
    assert isinstance(docstring, ast.Expr)
    return [ast.unparse(node) for node in body if not isinstance(node, ast.Import | ast.ImportFrom)]


def test_quickstart_learns_in_twenty_lines():
    path = EXAMPLES / "quickstart.py"
    assert len([line for line in path.read_text().splitlines()[1:] if line.strip()]) <= 20
    assert last_loss(path) < 0.5  # of 8, the variance of what it learns


@pytest.mark.exhaustive
def test_before_and_after_differ_in_imports_alone_and_learn_the_same():
    before, after = EXAMPLES / "before_after" / "before.py", EXAMPLES / "before_after" / "after.py"
    assert without_imports(before) == without_imports(after)
    losses = last_loss(before), last_loss(after)
    assert abs(losses[0] - losses[1]) < 0.1 * losses[0]
