"""Compiles for the CPU the C++ that is meant for a GPU alone: PTX instructions become calls of instructions.h."""

import re
import shutil
import subprocess
from pathlib import Path

from tests import ROOT
from tests.proof.emulation import find_compiler

HERE = Path(__file__).parent
INSTRUCTION = re.compile(r'asm\("([\w.]+) %0, %1;" : "=\w"\(([\w.]+)\) : "\w"\(([\w.]+)\)\);')


def build(source: Path, directory: Path, *flags: str) -> Path:
    """Compile a program as code for compute capability 8.0 is compiled. An instruction that instructions.h lacks is an
    error."""
    csrc = directory / "csrc"
    shutil.copytree(ROOT / "csrc", csrc)
    for path in csrc.rglob("*.h"):
        path.write_text(INSTRUCTION.sub(_call, path.read_text()))
    program = directory / source.stem
    command = [*find_compiler(), "-std=c++17", "-O2", "-ffp-contract=off", "-fno-math-errno", "-Wno-psabi"]
    if subprocess.run([*command, "-mfma", "-fsyntax-only", "-x", "c++", "/dev/null"], check=False).returncode == 0:
        command.append("-mfma")  # or each fma is a call: exact, and slow
    includes = [f"-I{path}" for path in (csrc, HERE, HERE / "emulation" / "include")]
    first = ["-include", "cuda_runtime.h", "-include", "instructions.h"]
    command += ["-D__CUDA_ARCH__=800", *includes, *first, *flags]
    subprocess.run([*command, str(source), "-o", str(program)], check=True)
    return program


def _call(found: re.Match[str]) -> str:
    name, result, argument = found.groups()
    return f"{result} = {name.replace('.', '_')}({argument});"
