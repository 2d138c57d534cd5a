"""Every drop-in with the tools of other libraries: right or refused. tests/matrix/table.py has the table."""

from tests import libraries
from tests.matrix import table
from tests.matrix.runner import judge
from tests.networks import one_thread

libraries.need()
from tests.matrix import adapters, trainers  # noqa: E402

__all__ = ["adapters", "one_thread", "trainers"]  # the table's tools, and a fixture of each test


@table.parametrize(table.OTHER_LIBRARIES)
def test_with_another_library(tool, drop_in, wanted):
    table.check(judge(tool, drop_in), wanted)
