"""The activations' formulas in C++, with every instruction set that this machine has."""

import subprocess
from pathlib import Path

import pytest

from tests.emulation import find_compiler
from tests.test_isa import CSRC, ISAS, X86

# Without an fma z^2 is rounded, and exp(-z^2 / 2) is as far off as that times z^2.
GELU_BOUND = {"baseline": 60}


@pytest.mark.parametrize("isa", ISAS)
def test_every_activation_is_as_near_to_fp64_as_fp32_can_be(tmp_path, isa):
    program = tmp_path / "activation"
    command = [*find_compiler(), "-std=c++17", "-O2", "-ffp-contract=off", "-fno-math-errno", "-Wno-psabi"]
    command += ["-DMPK_X86"] * X86 + ISAS[isa] + [f"-DMPK_ISA={isa}", f"-DMPK_GELU_BOUND={GELU_BOUND.get(isa, 4)}"]
    source = Path(__file__).with_name("activation.cpp")
    subprocess.run([*command, f"-I{CSRC}", str(source), "-o", str(program)], check=True)
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    if done.returncode < 0:
        pytest.skip(f"this machine has no {isa}")
    assert done.returncode == 0, done.stdout
