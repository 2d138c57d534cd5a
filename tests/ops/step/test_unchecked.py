"""Roots and quotients without a branch are the nearest, and rules that use them give the bits of those that branch."""

import shlex
import subprocess
from pathlib import Path

import pytest

import toolchain
from tests import ROOT
from tests.proof import instructions


@pytest.mark.parametrize(
    ("every", "elements"), [(101, 100_000), pytest.param(1, 10_000_000, marks=pytest.mark.exhaustive)]
)
def test_roots_quotients_and_rules_without_a_branch_give_the_same_bits(tmp_path, every, elements):
    program = instructions.build(Path(__file__).with_name("unchecked.cpp"), tmp_path)
    done = subprocess.run([program, str(every), str(elements)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.exhaustive
@pytest.mark.kernels("native")
def test_roots_and_quotients_on_a_gpu_are_those_of_its_own(target, tmp_path):
    if target.device.type != "cuda":
        pytest.skip("a CPU has no such instructions")
    source, program = Path(__file__).with_name("unchecked.cu"), tmp_path / "unchecked"
    compile_ = shlex.split(toolchain.find_cuda(toolchain.find_cxx()).compile)
    subprocess.run([*compile_, "-std=c++17", "-O3", f"-I{ROOT / 'csrc'}", str(source), "-o", str(program)], check=True)
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "no error, 0 differ\n")
