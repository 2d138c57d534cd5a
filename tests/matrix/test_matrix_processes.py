"""Every drop-in with torch.distributed's tools: right or refused. tests/matrix/table.py has the table."""

import pytest

from tests.matrix import table
from tests.matrix.ranks import judge_all
from tests.processes import needs_gloo

MODULES = ["tests.matrix.many_processes", "tests.matrix.fsdp1", "tests.matrix.sharded"]


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory):
    cells = [(tool, drop_in.name) for tool, drop_in, _ in table.cells(table.TWO_PROCESSES)]
    return judge_all(MODULES, cells, tmp_path_factory.mktemp("ranks"))


@needs_gloo
@table.parametrize(table.TWO_PROCESSES)
def test_in_two_processes(verdicts, tool, drop_in, wanted):
    for verdict in verdicts[tool, drop_in.name]:
        table.check(verdict, wanted)
