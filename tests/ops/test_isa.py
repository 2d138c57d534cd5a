"""CPU kernels are compiled once per instruction set and picked at run time; a user's machine may pick any of them."""

import platform
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests import ROOT
from tests.proof.emulation import find_compiler

CSRC = ROOT / "csrc"
X86 = platform.machine() in ("x86_64", "AMD64")
ISAS = {"baseline": []} | ({"avx2": ["-march=x86-64-v3"], "avx512": ["-march=x86-64-v4"]} if X86 else {})


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
