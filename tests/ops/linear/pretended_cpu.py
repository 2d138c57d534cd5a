"""Builds the CPU's linear ops as a library that any machine can load. A test decides whether the library takes the
machine for one that multiplies 16-bit matrices fast."""

import ctypes
import fcntl
import functools
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path

import torch

from mpkernels.ops import _dispatcher, _registry
from tests import ROOT
from tests.proof import emulation

LIBRARY = "mpkernels_halves"
FLAGS = "-std=c++17 -O1 -fPIC -fvisibility=hidden -ffp-contract=off -fno-math-errno -Wno-psabi -shared"


@functools.cache
def kernels():
    """Return the kernels of the linear ops, as ``_dispatcher.force`` takes them."""
    schemas = torch.library.Library(LIBRARY, "DEF")
    ops = [op for op in _registry._ops.values() if op.name.startswith("linear_")]
    for op in ops:
        schemas.define(op.schema)
        schemas.impl(op.name, torch.library.fallthrough_kernel, "Autograd")
    _schemas.append(schemas)
    torch.ops.load_library(str(_build()))
    return {(op.name, "cpu"): getattr(getattr(torch.ops, LIBRARY), op.name).default for op in ops}


_schemas = []  # they live as long as this list does


@functools.cache
def _build():
    """Compile the library unless that is done, and return its path."""
    cxx, csrc = emulation.find_compiler(), ROOT / "csrc"
    built = ROOT / "build" / "halves" / f"{LIBRARY}-{emulation.fingerprint(cxx, csrc)}.so"
    built.parent.mkdir(parents=True, exist_ok=True)
    with (built.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one of pytest's workers builds, the others wait
        if not built.exists():
            _compile(cxx, csrc, built)
    return built


def _compile(cxx, csrc, built):
    sources = [*(csrc / "linear").glob("*_cpu.cpp"), *(csrc / "linear").glob("linear_*_torch.cpp")]
    macros = "-DMPK_ISA=baseline", f'-DMPK_LIBRARY="{LIBRARY}"', "-DMPK_HALF_PRODUCTS=multiplies_halves_fast"
    includes = f"-I{csrc}", "-include", Path(__file__).with_name("pretended_cpu.h")
    with tempfile.TemporaryDirectory(dir=built.parent) as scratch:
        stub, linked = Path(scratch, "libtorch.so"), Path(scratch, "linked.so")
        subprocess.run([*cxx, "-shared", "-Wl,-soname,libtorch.so", "-x", "c++", "/dev/null", "-o", stub], check=True)
        subprocess.run(
            [*cxx, *FLAGS.split(), *macros, *includes, *sources, "-Wl,--no-as-needed", stub, "-o", linked], check=True
        )
        linked.replace(built)


@contextmanager
def products_in_halves(is_fast):
    """Run this library's linear ops as on a CPU that multiplies 16-bit matrices fast, or on one that doesn't."""
    with _dispatcher.force(kernels()):
        ctypes.c_int.in_dll(ctypes.CDLL(str(_build())), "multiplies_halves_fast").value = is_fast
        yield
