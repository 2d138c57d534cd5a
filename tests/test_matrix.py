"""Every drop-in with torch's own tools: right or refused. tests/matrix/table.py has the table."""

import pytest

from tests.matrix import plain_torch, reparametrised, table
from tests.matrix.ranks import judge_all
from tests.matrix.runner import judge
from tests.networks import one_thread
from tests.processes import needs_gloo

__all__ = ["one_thread", "plain_torch", "reparametrised"]  # a fixture that each test uses, and the tools of the table
MODULES = ["tests.matrix.many_processes", "tests.matrix.fsdp1", "tests.matrix.sharded"]


@table.parametrize(table.ONE_PROCESS)
def test_in_one_process(tool, drop_in, wanted):
    table.check(judge(tool, drop_in), wanted)


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory):
    cells = [(tool, drop_in.name) for tool, drop_in, _ in table.cells(table.TWO_PROCESSES)]
    return judge_all(MODULES, cells, tmp_path_factory.mktemp("ranks"))


@needs_gloo
@table.parametrize(table.TWO_PROCESSES)
def test_in_two_processes(verdicts, tool, drop_in, wanted):
    for verdict in verdicts[tool, drop_in.name]:
        table.check(verdict, wanted)
