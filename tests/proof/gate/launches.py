"""Records the launches of users: each op's Triton launcher runs on CPU tensors, and nothing is compiled."""

import importlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import MagicMock, patch

import torch
from torch.utils._pytree import tree_map
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import JITFunction, driver

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
    source: ASTSource  # the kernel, its arguments' types and alignment, and the constants
    chip: str
    options: dict[str, Any]

    @property
    def kernel(self) -> tuple[str, str]:
        return self.source.fn.module, self.source.fn.__name__

    @property
    def name(self) -> str:
        """The launch in Triton's notation, where :16 marks a pointer or size that is known to be a multiple of 16."""
        constants = {path: value for (path, *_), value in self.source.constants.items()}
        aligned = {path for (path, *_), it in self.source.attrs.items() if ["tt.divisibility", 16] in it}
        arguments = [
            f"{name}={_short(constants[i])}" if i in constants else f"{kind}:16" if i in aligned else str(kind)
            for i, (name, kind) in enumerate(self.source.signature.items())
        ]
        options = [f"{option}={self.options[option]}" for option in ("num_warps", "enable_fp_fusion")]
        module, kernel = self.kernel
        return f"{module.rpartition('.')[2]}.{kernel}({', '.join(arguments)}) {' '.join(options)}"


def _short(constant: Any) -> Any:
    """Return module.name if a constant is a function, such as a rule's formula."""
    is_function = isinstance(constant, JITFunction)
    return f"{constant.module.rpartition('.')[2]}.{constant.__name__}" if is_function else constant


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
    launches: list[Launch] = []

    def note(source: ASTSource, *, options: dict[str, Any], **_: Any) -> Any:
        launches.append(Launch(source, driver.active.chip, options))
        return MagicMock()  # a kernel that does nothing

    problems = []
    with patch("triton.compiler.compile", note):
        for chip in TARGETS:
            driver.set_active(NoGpu(chip))
            for op in _registry._ops.values():
                if op.triton_module in _triton_modules():
                    before = len(launches)
                    problems += _launch(op, chip)
                    if len(launches) == before:
                        problems.append(f"{op.name} on {chip}: its Triton kernel was not launched")
    launched = {launch.kernel for launch in launches}
    problems += [f"{'.'.join(kernel)}: no op launched it" for kernel in _kernels() if kernel not in launched]
    return launches, problems


def _launch(op: _registry.Op, chip: str) -> list[str]:
    try:
        for arguments in _calls(op, chip):
            op.triton(*arguments)
    except Exception as error:  # whatever a launcher throws
        return [f"{op.name} on {chip}: {error!r}"]
    return []


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
            if name.endswith("_kernel") and isinstance(value, JITFunction):
                yield value.module, name  # not the module that imports it
