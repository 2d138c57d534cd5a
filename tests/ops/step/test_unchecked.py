"""Roots and quotients without a branch are the nearest, and rules that use them give the bits of those that branch."""

import subprocess
from pathlib import Path

import pytest

from tests.proof import instructions


@pytest.mark.parametrize(
    ("every", "elements"), [(101, 100_000), pytest.param(1, 20_000_000, marks=pytest.mark.exhaustive)]
)
def test_roots_quotients_and_rules_without_a_branch_give_the_same_bits(tmp_path, every, elements):
    program = instructions.build(Path(__file__).with_name("unchecked.cpp"), tmp_path)
    done = subprocess.run([program, str(every), str(elements)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
