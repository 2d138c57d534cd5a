"""The package after ``import mpkernels``."""

import subprocess
import sys
from pathlib import Path

import pytest

import mpkernels
from mpkernels.ops import _extension

SUBMODULES = """
import mpkernels
print(mpkernels.optim.AdamW, mpkernels.amp.GradScaler, mpkernels.nn.LinearAct, mpkernels.functional.linear_act)
print(mpkernels.doctor.advise, mpkernels.ops.unscale_, mpkernels.selector.choices)
"""


def test_submodules_need_no_import_of_their_own():
    command = [sys.executable, "-W", "error", "-c", SUBMODULES]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("noted", "found"), [('{"sources": "abc"}', {"sources": "abc"}), ('{"sources": ', {}), (None, {})]
)
def test_the_build_info_may_be_damaged_or_missing(tmp_path, noted, found):
    """Otherwise the package could neither be imported nor say how to build it again."""
    if noted is not None:
        (tmp_path / "_build_info.json").write_text(noted)
    assert _extension.build_info(tmp_path / "_native.so") == found


def test_copies_that_nobody_waits_for_are_made_in_four_places():
    """parameters.py decides whether a copy to the host waits, readback.py reads after the copy has arrived, and
    copies.py waits for its streams. _tensor_table.py copies to the device from memory that nobody writes to."""
    root = Path(mpkernels.__file__).parent
    found = [path.relative_to(root) for path in root.rglob("*.py") if "non_blocking" in path.read_text()]
    assert sorted(map(str, found)) == [
        *("_shared/parameters.py", "ops/_tensor_table.py", "optim/offload/copies.py", "optim/readback.py")
    ]
