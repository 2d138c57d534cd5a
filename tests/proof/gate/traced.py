"""Each case's launches, on the machine code that the gate has compiled: a block of each is run and counted."""

import ctypes
import hashlib
import importlib
import json
import pickle
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from triton import knobs
from triton.runtime import driver

import mpkernels
from mpkernels.ops import _dispatcher, _registry
from tests import targets
from tests.proof.gate import launches
from tests.proof.gate.chips import CODES
from tests.proof.gate.measure import demangled, output
from tests.proof.gate.memory_bound_calls import CASES, ORDINARY
from tests.proof.gate.traces import Traced
from tests.proof.sass.code import Code
from tests.proof.sass.counts import count
from tests.proof.sass.warp import Launch


class Seen(NamedTuple):
    """A launch of an op's kernel."""

    key: str  # under which its code is kept: a mangled name; of Triton, what it is specialised for
    name: str
    launch: Launch
    triton: launches.Launch | None = None


Take = Callable[[Seen], None]


def keep_code(keep: Path, key: str, code: Code) -> None:
    _file(keep, key, code.chip).write_bytes(pickle.dumps(code))


def _file(keep: Path, key: str, chip: str) -> Path:
    return keep / hashlib.sha256(f"{key} on {chip}".encode()).hexdigest()


def trace(compiler: str, case: str, chip: str, keep: Path) -> list[Traced]:
    """Trace a case's launches on a chip, with code from ``keep``. They must store what the reference computes."""
    rows, stored = [], dict[int, int]()

    def take(seen: Seen) -> None:
        counts, memory = count(pickle.loads(_file(keep, seen.key, chip).read_bytes()), seen.launch)
        rows.append(Traced(seen.name, [*seen.launch.grid], seen.launch.block, **counts))
        stored.update(memory.stored)

    call, sizes = CASES[case].call, CASES[case].sizes
    with WATCHERS[compiler](chip, take):
        changed = call(sizes)
    with mpkernels.backend("reference"):
        compare(stored, changed, call([ORDINARY]) if changed else [])
    return rows


def compare(stored: dict[int, int], changed: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for i, (tensor, want) in enumerate(zip(changed, wanted, strict=True)):
        begin, content = tensor.data_ptr(), want.view(torch.uint8).numpy().tobytes()
        of_tensor = {at - begin: byte for at, byte in stored.items() if begin <= at < begin + tensor.nbytes}
        wrong = [at for at, byte in of_tensor.items() if at >= len(content) or byte != content[at]]
        if wrong or not of_tensor:
            raise ValueError(f"of {len(of_tensor)} bytes stored in tensor {i}, {len(wrong)} are not the reference's")


def triton_launches() -> list[launches.Launch]:
    """What must be compiled for all cases on all chips."""
    found: list[launches.Launch] = []
    for chip in CODES:
        with watch_triton(chip, lambda it: found.append(it.triton) if it.triton else None):
            for case in CASES.values():
                if "triton" in case.compilers:
                    case.call(case.sizes)
    return found


# ---- CUDA C++: the emulation tells of a launch instead of doing it


@contextmanager
def watch_cuda(chip: str, take: Take) -> Iterator[None]:
    target = targets.TARGETS["cpu-cuda"]
    if why := target.why_missing():
        raise RuntimeError(why)
    path = targets.emulation_library()
    library = ctypes.CDLL(str(path))
    names = _symbols(path)
    known = ctypes.c_int.in_dll(library, "emulation_launches")
    loaded_at = ctypes.addressof(known) - next(at for at, name in names.items() if name == "emulation_launches")
    errors: list[Exception] = []

    def note(kernel: int, parameters: int, size: int, grid: int, block: int) -> bool:
        try:
            key = names[kernel - loaded_at]
            take(Seen(key, demangled(key), Launch(ctypes.string_at(parameters, size), (grid,), block)))
        except Exception as error:  # C++ can't pass it on
            errors.append(error)
        return grid == 1 or "upload" in key  # it is done: it makes what the next one reads

    watcher = ctypes.c_void_p.in_dll(library, "emulation_watcher")
    pointer, number = ctypes.c_void_p, ctypes.c_uint
    signature = ctypes.CFUNCTYPE(ctypes.c_int, pointer, pointer, ctypes.c_size_t, number, number)
    callback = signature(note)
    watcher.value = ctypes.cast(callback, ctypes.c_void_p).value
    try:
        with target.active():
            yield
    finally:
        watcher.value = None
    if errors:
        raise errors[0]


def _symbols(library: Path) -> dict[int, str]:
    lines = [line.split() for line in output("nm", str(library)).splitlines()]
    return {int(at, 16): name for at, _, name in (line for line in lines if len(line) == 3)}


# ---- Triton: its launcher runs on CPU tensors, up to where it would compile


class NothingCompiled(launches.NoGpu):
    def get_current_device(self) -> str:
        return f"{self.chip}, nothing compiled"


@contextmanager
def watch_triton(chip: str, take: Take) -> Iterator[None]:
    driver.set_active(NothingCompiled(chip))
    last: dict[str, Any] = {}

    def note(*, fn: Any, compile: Any, **_: Any) -> bool:
        launch = launches.Launch(fn.module, fn.name, chip, compile["specialization_data"])
        arguments = _launch(launch.find_kernel(), json.loads(launch.specialization), **last)
        take(Seen(launch.specialised, fn.name, arguments, launch))
        return True

    kernels = {op.name: op.triton for op in _registry._ops.values() if op.triton_module in launches._triton_modules()}
    knobs.runtime.jit_cache_hook = note
    with _noted(last), _dispatcher.force({(name, "cpu"): kernel for name, kernel in kernels.items()}):
        yield


@contextmanager
def _noted(last: dict[str, Any]) -> Iterator[None]:
    """Triton tells its hook neither the arguments nor the grid."""
    undo = []
    for module, name in launches._kernels():
        kernel = getattr(importlib.import_module(module), name)

        def run(*arguments: Any, grid: Any, warmup: bool, run: Any = kernel.run, **options: Any) -> Any:
            last.update(arguments=arguments, options=options, grid=grid)
            return run(*arguments, grid=grid, warmup=warmup, **options)

        kernel.run = run
        undo.append(kernel)
    try:
        yield
    finally:
        for kernel in undo:
            del kernel.run


FORMATS = {"i1": "?", "i8": "b", "i32": "i", "u32": "I", "i64": "q", "u64": "Q", "fp32": "f", "fp64": "d"}


def _launch(kernel: Any, it: dict[str, Any], arguments: tuple[Any, ...], options: Any, grid: Any) -> Launch:
    values = dict(zip(kernel.arg_names, arguments, strict=False)) | options
    parameters = b""
    for name, kind in it["signature"].items():
        if kind == "constexpr":
            continue
        value = values[name].data_ptr() if isinstance(values[name], torch.Tensor) else values[name]
        layout = "Q" if kind.startswith("*") else FORMATS[kind]
        size = struct.calcsize(layout)
        parameters += b"\0" * (-len(parameters) % size) + struct.pack(layout, value)
    scratch = b"\0" * (-len(parameters) % 8 + 16)  # Triton's own: none is asked for
    return Launch(parameters + scratch, tuple(grid), 32 * it["options"]["num_warps"])


WATCHERS = {"nvcc": watch_cuda, "triton": watch_triton}
