"""Every drop-in with torch.distributed's tools: right or refused. tests/matrix/table.py has the table."""

import pytest

from tests.matrix import table
from tests.matrix.ranks import judge_all
from tests.processes import in_processes

MODULES = ["tests.matrix.many_processes", "tests.matrix.fsdp1", "tests.matrix.sharded"]


@pytest.fixture(scope="module")
def verdicts(request, tmp_path_factory):
    return judge_all(MODULES, table.asked_for(request), tmp_path_factory.mktemp("ranks"))


@in_processes
@pytest.mark.each_value_once
@table.parametrize(table.TWO_PROCESSES)
def test_in_two_processes(verdicts, tool, drop_in, wanted):
    for verdict in verdicts[tool, drop_in.name]:
        table.check(verdict, wanted)
