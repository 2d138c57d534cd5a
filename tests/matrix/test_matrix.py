"""Every drop-in with torch's own tools: right or refused. tests/matrix/table.py has the table."""

import pytest

from tests.matrix import copies, plain_torch, reparametrised, table
from tests.matrix.runner import judge
from tests.networks import one_thread

__all__ = ["copies", "one_thread", "plain_torch", "reparametrised"]  # the table's tools, and a fixture of each test


@pytest.mark.each_value_once
@table.parametrize(table.ONE_PROCESS)
def test_in_one_process(tool, drop_in, wanted):
    table.check(judge(tool, drop_in), wanted)
