"""One op, several kernels, and torch's own dispatcher to choose between them.

An op's schema is declared once, by ``define`` in ops/<family>/<op>.py. Its reference, in plain torch, is at once the
specification, the oracle of the tests, the fake kernel of torch.compile and the fallback on any device. Kernels attach
themselves to the schema: C++ and CUDA when the library is loaded (csrc/<family>/<op>_torch.cpp), Triton by
``implement`` in ops/<family>/<op>_triton.py, or in the module that ``define`` names. Nobody imports a kernel.
"""

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from mpkernels._torch_private.modes import count_dispatch_modes
from mpkernels._torch_private.ops import below_autograd, builtin_of, keys_below_autograd
from mpkernels.ops import _devices, _dispatcher
from mpkernels.ops._devices import ANY_TRITON, capabilities, left_out
from mpkernels.ops._dispatcher import DEVICES, NAMESPACE, forced

BACKENDS = ("native", "triton", "reference")

_library = _dispatcher.definitions
_ops: dict[str, "Op"] = {}
_triton_kernels: dict[str, Callable[..., Any]] = {}


class Op:
    """A declared op. Calling it runs the kernel that the dispatcher picks."""

    def __init__(
        self, schema: str, reference: Callable[..., Any], check: Callable[..., None], triton_module: str
    ) -> None:
        self.name = schema.partition("(")[0]
        self.triton_module = triton_module or f"{reference.__module__}_triton"
        self.schema = schema
        self.reference = _python_kernel(reference, check)
        self._check = check
        _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        _library.impl(self.name, self.reference, "CompositeExplicitAutograd")
        # Not differentiable: without this, autograd's fallback would mark results as requiring a gradient.
        _library.impl(self.name, torch.library.fallthrough_kernel, "Autograd")
        self.overload: Any = getattr(getattr(torch.ops, NAMESPACE), self.name).default
        arguments = schema.partition("(")[2].partition(") ->")[0].split(", ")
        self._takes_lists = any("[]" in argument for argument in arguments)
        self._mutated = [i for i, argument in enumerate(arguments) if "!" in argument]
        if self._mutated and keys_below_autograd is not None:
            _library.impl(self.name, self._bump_versions, "ADInplaceOrView", with_keyset=True)

    def __call__(self, *arguments: Any) -> Any:
        """Kernels check what memory safety needs; once one has refused, work out what the user did wrong."""
        if self._takes_lists:  # an iterator would be used up by the op, and nothing be left to tell autograd of
            arguments = tuple(list(it) if isinstance(it, Iterator) else it for it in arguments)
        try:
            if not self._mutated or torch.compiler.is_compiling():
                return self.overload(*arguments)
            # What the ADInplaceOrView kernel does, without a second trip of the list through Python.
            with nullcontext() if below_autograd is None else below_autograd():
                result = self.overload(*arguments)
            self._tell_autograd(arguments)
            return result
        except (RuntimeError, TypeError):
            self._check(*arguments)
            raise

    def triton(self, *arguments: Any) -> Any:
        """Run the Triton kernel. The first call imports Triton, which takes longer than all other imports here."""
        if self.name not in _triton_kernels:
            importlib.import_module(self.triton_module)
        return _triton_kernels[self.name](*arguments)

    def by(self, kernel: str) -> Callable[..., Any]:
        """Return a function that runs the named kernel. For "triton" that is the op under a second name, unless
        torch.compile or a dispatch mode is active, which only know the first name."""
        if kernel != "triton" or torch.compiler.is_compiling() or count_dispatch_modes() > 0:
            return self
        return self._by_triton

    def directly_by(self, kernel: str) -> Callable[..., Any]:
        """Return a function that runs the named kernel, and doesn't work out what is wrong with arguments."""
        return (lambda *arguments: self.by(kernel)(*arguments)) if kernel == "triton" else builtin_of(self.overload)

    @functools.cached_property
    def _by_triton(self) -> Callable[..., Any]:
        """The same op under a second name, which Triton serves where C++ serves the first."""
        name = f"{self.name}_by_triton"
        _library.define(name + self.schema.removeprefix(self.name))
        _library.impl(name, self.reference, "CompositeExplicitAutograd")
        _library.impl(name, torch.library.fallthrough_kernel, "Autograd")
        for device_type, key in DEVICES.items():
            if "triton" in kernels_on(torch.device(device_type), self.name):
                _library.impl(name, self.triton, key)
        overload: Callable[..., Any] = getattr(getattr(torch.ops, NAMESPACE), name).default
        return overload

    def _bump_versions(self, keyset: Any, *arguments: Any) -> Any:
        result = self.overload.redispatch(keyset & keys_below_autograd, *arguments)
        self._tell_autograd(arguments)
        return result

    def _tell_autograd(self, arguments: Sequence[Any]) -> None:
        """Raise the versions of what kernels change: they get bare pointers, so torch can't see the changes."""
        for i in self._mutated:
            if arguments[i] is not None:
                torch.autograd.graph.increment_version(arguments[i])


def define(schema: str, *, check: Callable[..., None], triton_module: str = "") -> Callable[[Callable[..., Any]], Op]:
    """Declare an op by its schema and the decorated reference. ``check`` raises the error that a user should see.
    ``triton_module`` holds the op's Triton kernel, if that isn't the reference's own with _triton at its end."""

    def declare(reference: Callable[..., Any]) -> Op:
        op = Op(schema, reference, check, triton_module)
        _ops[op.name] = op
        return op

    return declare


class NativeCall:
    """A second schema that only C++ implements: a shorter way to call an op. The op stays the specification."""

    def __init__(self, op: Op, schema: str) -> None:
        self.op, self.schema, self.name = op, schema, schema.partition("(")[0]
        _library.define(schema)
        _library.impl(self.name, torch.library.fallthrough_kernel, "Autograd")
        self.overload: Any = getattr(getattr(torch.ops, NAMESPACE), self.name).default
        _native_calls[self.name] = self
        _dispatcher.off_stack.add(self.name)

    def on(self, device: torch.device) -> Callable[..., Any] | None:
        """Return the C++ function for a device; None if another kernel than C++'s runs the op now."""
        innermost = forced[-1] if forced else {}
        if (self.op.name, device.type) in innermost:
            return innermost.get((self.name, device.type))
        is_there = (self.name, device.type) in _native and device not in left_out
        return self.overload if is_there else None


_native_calls: dict[str, NativeCall] = {}


def implement(op: Op) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated launcher as the op's Triton kernel."""

    def register(launcher: Callable[..., Any]) -> Callable[..., Any]:
        _triton_kernels[op.name] = _python_kernel(_devices.on_their_device(launcher), op._check)
        return launcher

    return register


def _python_kernel(function: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
    """Wrap a Python kernel: check the arguments first, and compute without autograd, which is registered apart."""

    def kernel(*arguments: Any) -> Any:
        check(*arguments)
        with torch.no_grad():
            return function(*arguments)

    return kernel


_is_installed = functools.cache(importlib.util.find_spec)


def _triton_runs_on(device_type: str) -> bool:
    if _is_installed("triton") is None:
        return False
    if device_type == "cuda":
        return True
    import triton

    return bool(triton.knobs.runtime.interpret)  # then kernels are interpreted, on CPU tensors


def backends(op: str, device: str | torch.device = "cpu") -> list[str]:
    """Return the names of an op's kernels on a device. The first one is used.

    >>> mpkernels.backends("unscale_", "cuda")
    ['native', 'triton', 'reference']

    What a GPU can't run is known once torch has begun to use CUDA. This function doesn't make torch begin.
    """
    if op not in _ops:
        raise ValueError(f"backends: op must be one of {', '.join(sorted(_ops))}, got {op!r}")
    device = torch.device(device)
    if device.type == "cuda" and device.index is None and torch.cuda.is_initialized():
        device = torch.device("cuda", torch.cuda.current_device())
    return kernels_on(device, op)


def kernels_on(device: torch.device, op: str) -> list[str]:
    """As ``backends`` does. A device without an index counts as one that runs every kernel."""
    runs = {
        "native": (op, device.type) in _native and device not in left_out,
        "triton": device.type in DEVICES
        and _is_installed(_ops[op].triton_module) is not None
        and _triton_runs_on(device.type)
        and capabilities.get(device, ANY_TRITON) >= ANY_TRITON,
        "reference": True,
    }
    return [name for name in BACKENDS if runs[name]]


_native: set[tuple[str, str]] = set()  # (op, device type) that the loaded library serves
