"""PTX's conversions, which only a GPU runs, give the bits of the other kernels. tests/ops/linear/test_activation.py has
PTX's approximations."""

import subprocess
from pathlib import Path

import pytest

from tests.proof import instructions


@pytest.mark.exhaustive
def test_conversions_of_the_chip_are_those_of_every_other_kernel(tmp_path):
    program = instructions.build(Path(__file__).with_name("conversions.cpp"), tmp_path)
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
