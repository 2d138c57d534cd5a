"""CPU kernels are compiled once per instruction set and picked at run time; a user's machine may pick any of them."""

import os
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from mpkernels.functional import linear_act
from tests import ROOT
from tests.linear_cases import layer, relative_error, results
from tests.proof.emulation import find_compiler

CSRC = ROOT / "csrc"
X86 = platform.machine() in ("x86_64", "AMD64")
ISAS = {"baseline": []} | ({"avx2": ["-march=x86-64-v3"], "avx512": ["-march=x86-64-v4"]} if X86 else {})


@pytest.mark.exhaustive
def test_every_instruction_set_gives_the_same_bits(tmp_path):
    common = [*find_compiler(), "-std=c++17", "-O2", "-ffp-contract=off", "-Wno-psabi", f"-I{CSRC}"]
    common += ["-DMPK_X86"] * X86
    commands = [
        [*common, *flags, f"-DMPK_ISA={isa}", "-c", str(source), "-o", str(tmp_path / f"{source.stem}.{isa}.o")]
        for isa, flags in ISAS.items()
        for source in CSRC.rglob("*_cpu.cpp")
    ]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda command: subprocess.run(command, check=True), commands))
    program = tmp_path / "isa"
    harness = Path(__file__).with_name("isa.cpp")
    subprocess.run([*common, str(harness), *map(str, tmp_path.glob("*.o")), "-o", str(program)], check=True)
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "baseline" in done.stdout


@pytest.mark.exhaustive
def test_products_are_in_fp32_where_onednn_may_not_use_16_bit_instructions(tmp_path):
    """There, oneDNN multiplies 16-bit matrices slower than fp32 ones, so our kernel must multiply in fp32."""
    x, weight, bias, dy = layer(130, 97, 75, torch.bfloat16)
    torch.save((x, weight, bias), tmp_path / "layer.pt")
    code = (
        "import sys, torch, mpkernels\n"
        "from mpkernels.functional import linear_act\n"
        "with mpkernels.backend('native'):\n"
        "    torch.save(linear_act(*torch.load(sys.argv[1]), 'gelu'), sys.argv[2])\n"
    )
    exact = results(linear_act, *(it.double() for it in (x, weight, bias, dy)), "gelu")[0]
    for limit in ("AVX512_CORE", "AVX2"):
        command = [sys.executable, "-c", code, str(tmp_path / "layer.pt"), str(tmp_path / "y.pt")]
        subprocess.run(command, env=os.environ | {"ONEDNN_MAX_CPU_ISA": limit}, check=True)
        # Errors of one rounding are evenly spread, eps / sqrt(12): nothing was rounded before the end.
        assert relative_error(torch.load(tmp_path / "y.pt"), exact) < 0.3 * torch.finfo(torch.bfloat16).eps
