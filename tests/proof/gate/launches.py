"""Records the launches of users: each op's Triton launcher runs on CPU tensors, and nothing is compiled."""

import importlib
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import KernelInterface, driver

from mpkernels import ops
from mpkernels.ops import _registry
from tests.hard_grads import DTYPES
from tests.ops.test_ops import ARGUMENTS, CALLS
from tests.proof.gate import linear_calls, step_calls

TARGETS = {
    "sm_75": GPUTarget("cuda", 75, 32),
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


class Launch(NamedTuple):
    module: str
    kernel: str
    chip: str
    specialization: str  # types, alignment, constants and options as Triton serializes them for JITFunction.preload

    @property
    def name(self) -> str:
        """The launch in Triton's notation, where :16 marks a pointer or size that is known to be a multiple of 16."""
        it = json.loads(self.specialization)
        constants = {path: value for (path, *_), value in zip(it["constant_keys"], it["constant_vals"], strict=True)}
        aligned = {
            path
            for (path, *_), attributes in zip(it["attrs_keys"], it["attrs_vals"], strict=True)
            if ["tt.divisibility", 16] in attributes
        }
        arguments = [
            f"{name}={_short(constants[i])}" if i in constants else f"{kind}:16" if i in aligned else str(kind)
            for i, (name, kind) in enumerate(it["signature"].items())
        ]
        options = [f"{option}={it['options'][option]}" for option in ("num_warps", "enable_fp_fusion")]
        return f"{self.module.rpartition('.')[2]}.{self.kernel}({', '.join(arguments)}) {' '.join(options)}"

    def find_kernel(self) -> Any:
        for value in json.loads(self.specialization)["constant_vals"]:
            if function := _function(value):
                importlib.import_module(function.partition(":")[0])  # Triton finds only functions that it has seen
        return getattr(importlib.import_module(self.module), self.kernel)


def _function(constant: Any) -> str:
    """Return module:name if a constant is a function, such as a rule's formula; else nothing."""
    return str(constant.get("jit_function", "")) if isinstance(constant, dict) else ""


def _short(constant: Any) -> Any:
    return _function(constant).rpartition(".")[2].replace(":", ".") or constant


class NoGpu:
    """Stands in for the driver of a chip that isn't there. Triton compiles for it, but can't run anything."""

    def __init__(self, chip: str) -> None:
        self.chip = chip

    def get_current_device(self) -> str:
        return self.chip  # Triton's caches are per device

    def get_current_stream(self, device: str) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return TARGETS[self.chip]


def record() -> tuple[list[Launch], list[str]]:
    """Return the launches of all ops on all chips, and a line for each launcher that failed or kernel that nobody
    launched."""
    launches: dict[Launch, None] = {}

    def note(*, fn: Any, compile: Any, **_: Any) -> bool:
        launches[Launch(fn.module, fn.name, driver.active.chip, compile["specialization_data"])] = None
        return True  # don't compile

    knobs.runtime.jit_cache_hook = note
    problems = []
    for chip in TARGETS:
        driver.set_active(NoGpu(chip))
        for op in _registry._ops.values():
            if op.triton_module in _triton_modules() and _runs_on(chip, op):
                before = len(launches)
                try:
                    for arguments in _calls(op, chip):
                        op.triton(*arguments)
                except Exception as error:  # whatever a launcher throws
                    problems.append(f"{op.name} on {chip}: {error!r}")
                else:
                    if len(launches) == before:
                        problems.append(f"{op.name} on {chip}: its Triton kernel was not launched")
    launched = {launch[:2] for launch in launches}
    problems += [f"{'.'.join(kernel)}: no op launched it" for kernel in _kernels() if kernel not in launched]
    return list(launches), problems


def _runs_on(chip: str, op: _registry.Op) -> bool:
    arch = TARGETS[chip].arch
    return not isinstance(arch, int) or divmod(arch, 10) >= op.triton_needs


def _calls(op: _registry.Op, chip: str) -> Iterator[tuple[Any, ...]]:
    """Yield the arguments of the op's own list of calls, or those that all ops are tested with, as they are and cast to
    every dtype that the op takes."""
    if op.name in linear_calls.CALLS:
        yield from linear_calls.CALLS[op.name](chip)
        return
    if op.name in step_calls.CALLS:
        yield from step_calls.CALLS[op.name]()
    for name, make in CALLS:
        if name == op.name:
            yield make("cpu")
    arguments = ARGUMENTS[op.name]("cpu")
    for dtype in DTYPES:
        cast = tree_map(partial(_cast, dtype=dtype), arguments)
        try:
            op._check(*cast)
        except (TypeError, ValueError):
            continue
        yield cast


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _triton_modules() -> list[str]:
    """Return the modules of all families' launchers."""
    return _modules("*_triton.py")


def _modules(names: str) -> list[str]:
    root = Path(ops.__file__).parent
    paths = sorted(path.relative_to(root) for path in root.rglob(names))
    return [".".join((ops.__name__, *path.with_suffix("").parts)) for path in paths]


def _kernels() -> Iterator[tuple[str, str]]:
    for found in (*_triton_modules(), *_modules("*_kernel.py")):
        module = importlib.import_module(found)
        for name, value in vars(module).items():
            if name.endswith("_kernel") and isinstance(value, KernelInterface):
                yield module.__name__, name
