"""The targets: every kernel, each on a device it can run on. A test that takes `target` runs once for each."""

import ctypes
import functools
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import mpkernels
from mpkernels.ops import _devices, _dispatcher, _registry
from tests import ROOT
from tests.proof import emulation

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
EMULATED = "mpkernels_emulated"


@dataclass(frozen=True)
class Target:
    device: torch.device
    kernel: str

    def __str__(self) -> str:
        return f"{self.device.type}-{self.kernel}"

    @property
    def is_interpreted(self) -> bool:
        """Whether Triton's interpreter runs the kernel, which takes milliseconds for each program."""
        return self.kernel == "triton" and os.environ.get("TRITON_INTERPRET") == "1"

    def why_missing(self) -> str | None:
        """Return why this machine can't run the target, or None."""
        if self.device == CUDA and not torch.cuda.is_available():
            return "torch sees no CUDA device"
        if self.kernel == "cuda":
            return _why_not_emulated()
        _devices.begin_to_use_cuda()
        for op in _registry._ops:
            if self.kernel not in mpkernels.backends(op, self.device):
                return f"{op} has only {', '.join(mpkernels.backends(op, self.device))}"
        return None

    @contextmanager
    def active(self) -> Iterator[None]:
        kernels = _emulated() if self.kernel == "cuda" else mpkernels.backend(self.kernel)
        with kernels, np.errstate(all="ignore"):  # Triton's interpreter computes with numpy, which warns of every inf
            yield


TARGETS = {
    str(target): target
    for target in (
        Target(CPU, "reference"),
        Target(CPU, "native"),
        Target(CPU, "triton"),  # interpreted
        Target(CPU, "cuda"),  # the CUDA C++ kernels, emulated
        Target(CUDA, "native"),
        Target(CUDA, "triton"),
    )
}


@functools.cache
def emulation_library() -> Path:
    return emulation.build(ROOT / "build" / "emulation")


def emulated_variable(name: str) -> ctypes.c_int:
    """Return a variable of the emulation, for tests to read and set."""
    return ctypes.c_int.in_dll(ctypes.CDLL(str(emulation_library())), name)


@functools.cache
def _why_not_emulated() -> str | None:
    try:
        library = emulation_library()
    except FileNotFoundError as error:
        return str(error)
    _emulated_schemas.append(torch.library.Library(EMULATED, "DEF"))
    for op in (*_registry._ops.values(), *_registry._native_calls.values()):
        _emulated_schemas[0].define(op.schema)
        _emulated_schemas[0].impl(op.name, torch.library.fallthrough_kernel, "Autograd")  # as the registry has it
    torch.ops.load_library(str(library))
    return None


_emulated_schemas: list[torch.library.Library] = []  # they live as long as this list does


def _emulated() -> AbstractContextManager[None]:
    names = (*_registry._ops, *_registry._native_calls)
    kernels = {(name, "cpu"): getattr(getattr(torch.ops, EMULATED), name).default for name in names}
    return _dispatcher.force(kernels)
