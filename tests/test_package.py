"""What ``import mpkernels`` gives."""

import subprocess
import sys

import pytest

import mpkernels

SUBMODULES = """
import mpkernels
print(mpkernels.optim.AdamW, mpkernels.amp.GradScaler, mpkernels.nn.LinearAct, mpkernels.functional.linear_act)
print(mpkernels.doctor.advise, mpkernels.ops.unscale_, mpkernels.selector.choices)
"""


def test_submodules_need_no_import_of_their_own():
    command = [sys.executable, "-W", "error", "-c", SUBMODULES]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_what_is_not_there_is_told_as_by_any_module():
    with pytest.raises(AttributeError, match=r"^module 'mpkernels' has no attribute 'optimizer'$"):
        mpkernels.optimizer  # noqa: B018
    assert not hasattr(mpkernels, "Gradscaler")
