"""The CPU's linear ops as on a machine that multiplies 16-bit matrices fast, or slowly. Each is compiled into a library
that any machine can load."""

import functools
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path

import torch

from mpkernels.ops import _registry, _stack
from tests import ROOT
from tests.proof import emulation

FLAGS = "-std=c++17 -O1 -fPIC -fvisibility=hidden -ffp-contract=off -fno-math-errno -Wno-psabi -shared"


@functools.cache
def kernels_of(is_fast):
    """Return these kernels of the linear ops, as ``_stack.force`` takes them."""
    library = f"mpkernels_halves_{is_fast}"
    schemas = torch.library.Library(library, "DEF")
    ops = [op for op in _registry._ops.values() if op.name.startswith("linear_")]
    for op in ops:
        schemas.define(op.schema)
        schemas.impl(op.name, torch.library.fallthrough_kernel, "Autograd")
    _schemas.append(schemas)
    torch.ops.load_library(str(_build(library, is_fast)))
    return {(op.name, "cpu"): getattr(getattr(torch.ops, library), op.name).default for op in ops}


_schemas = []  # they live as long as this list does


def _build(library, is_fast):
    """Compile the library, unless it is there."""
    cxx, csrc = emulation.find_compiler(), ROOT / "csrc"
    built = ROOT / "build" / "halves" / f"{library}-{emulation.fingerprint(cxx, csrc)}.so"
    if built.exists():
        return built
    built.parent.mkdir(parents=True, exist_ok=True)
    sources = [*(csrc / "linear").glob("*_cpu.cpp"), *(csrc / "linear").glob("linear_*_torch.cpp")]
    macros = "-DMPK_ISA=baseline", f'-DMPK_LIBRARY="{library}"', f"-DMPK_HALF_PRODUCTS={int(is_fast)}"
    with tempfile.TemporaryDirectory(dir=built.parent) as scratch:
        stub, linked = Path(scratch, "libtorch.so"), Path(scratch, "linked.so")
        subprocess.run([*cxx, "-shared", "-Wl,-soname,libtorch.so", "-x", "c++", "/dev/null", "-o", stub], check=True)
        subprocess.run(
            [*cxx, *FLAGS.split(), *macros, f"-I{csrc}", *sources, "-Wl,--no-as-needed", stub, "-o", linked], check=True
        )
        linked.replace(built)
    return built


@contextmanager
def products_in_halves(is_fast):
    with _stack.force(kernels_of(is_fast)):
        yield
