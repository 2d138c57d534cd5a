"""One op, several kernels, and torch's own dispatcher to choose between them.

An op's schema is declared once, here. Its reference, in plain torch, is at once the specification, the oracle of the
tests, the fake kernel of torch.compile and the fallback on any device. Kernels attach themselves to the schema: C++
and CUDA when the library is loaded (csrc/<family>/<op>_torch.cpp), Triton by ``implement`` in
ops/<family>/<op>_triton.py. Nobody imports a kernel.
"""

import functools
import importlib
import importlib.util
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch.library import Library

from mpkernels._torch_private import below_autograd, count_dispatch_modes, has_kernel, keys_below_autograd

NAMESPACE = "mpkernels"
BACKENDS = ("native", "triton", "reference")
DEVICES = {
    "cpu": "CPU",
    "cuda": "CUDA",
}  # torch.device.type -> dispatch key, where kernels other than the reference exist

_library = Library(NAMESPACE, "DEF")
_ops: dict[str, "Op"] = {}
_triton_kernels: dict[str, Callable[..., Any]] = {}


class Op:
    """A declared op. Calling it runs the kernel that the dispatcher picks."""

    def __init__(self, schema: str, reference: Callable[..., Any], check: Callable[..., None]) -> None:
        self.name = schema.partition("(")[0]
        self.triton_module = f"{reference.__module__}_triton"
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
        """Kernels check what memory safety needs; what the user did wrong is worked out only once one has refused."""
        if self._takes_lists:  # an iterator would be used up by the op, and nothing be left to tell autograd of
            arguments = tuple(list(each) if isinstance(each, Iterator) else each for each in arguments)
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
        """The Triton kernel. Triton is imported by the first call, since that takes longer than all else here."""
        if self.name not in _triton_kernels:
            importlib.import_module(self.triton_module)
        return _triton_kernels[self.name](*arguments)

    def by(self, kernel: str) -> Callable[..., Any]:
        """Return a function that runs the named kernel. For "triton" that is the op under its second name, unless
        torch.compile or a dispatch mode is active, which only know the first name."""
        is_heard = torch.compiler.is_compiling() or count_dispatch_modes() > 0
        return self._by_triton if kernel == "triton" and not is_heard else self

    @functools.cached_property
    def _by_triton(self) -> Callable[..., Any]:
        """The same op under a second name, which Triton serves where C++ serves the first."""
        name = f"{self.name}_by_triton"
        _library.define(name + self.schema.removeprefix(self.name))
        _library.impl(name, self.reference, "CompositeExplicitAutograd")
        _library.impl(name, torch.library.fallthrough_kernel, "Autograd")
        for device_type, key in DEVICES.items():
            if "triton" in backends(self.name, device_type):
                _library.impl(name, self.triton, key)
        overload: Callable[..., Any] = getattr(getattr(torch.ops, NAMESPACE), name).default
        return overload

    def _bump_versions(self, keyset: Any, *arguments: Any) -> Any:
        result = self.overload.redispatch(keyset & keys_below_autograd, *arguments)
        self._tell_autograd(arguments)
        return result

    def _tell_autograd(self, arguments: Sequence[Any]) -> None:
        """Kernels get bare pointers, so torch can't see what they change: raise its version for autograd."""
        for i in self._mutated:
            if arguments[i] is not None:
                torch.autograd.graph.increment_version(arguments[i])


def define(schema: str, *, check: Callable[..., None]) -> Callable[[Callable[..., Any]], Op]:
    """Declares an op by its schema and the decorated reference. ``check`` raises the error that a user should see."""

    def declare(reference: Callable[..., Any]) -> Op:
        op = Op(schema, reference, check)
        _ops[op.name] = op
        return op

    return declare


class NativeCall:
    """A second schema that C++ alone implements: a shorter way to call an op, which stays its specification."""

    def __init__(self, op: Op, schema: str) -> None:
        self.op, self.schema, self.name = op, schema, schema.partition("(")[0]
        _library.define(schema)
        _library.impl(self.name, torch.library.fallthrough_kernel, "Autograd")
        self.overload: Any = getattr(getattr(torch.ops, NAMESPACE), self.name).default
        _native_calls[self.name] = self

    def on(self, device_type: str) -> Callable[..., Any] | None:
        """Return the C++ function for a device type; None if another kernel than C++'s runs the op now."""
        innermost = forced[-1] if forced else {}
        if (self.op.name, device_type) in innermost:
            return innermost.get((self.name, device_type))
        return self.overload if (self.name, device_type) in _native else None


_native_calls: dict[str, NativeCall] = {}


def implement(op: Op) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers the decorated launcher as the op's Triton kernel."""

    def register(launcher: Callable[..., Any]) -> Callable[..., Any]:
        _triton_kernels[op.name] = _python_kernel(_on_their_device(launcher), op._check)
        return launcher

    return register


def _on_their_device(launcher: Callable[..., Any]) -> Callable[..., Any]:
    """Triton launches on the current device, whichever the tensors' is."""

    def launch(*arguments: Any) -> Any:
        of_each = (argument if isinstance(argument, list) else (argument,) for argument in arguments)
        first = next(filter(torch.is_tensor, chain.from_iterable(of_each)), None)
        if first is None or not first.is_cuda:
            return launcher(*arguments)
        with torch.cuda.device(first.device):
            return launcher(*arguments)

    return launch


def _python_kernel(function: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
    """Wrap a Python kernel: check the arguments first, and compute without autograd, which is registered apart."""

    def kernel(*arguments: Any) -> Any:
        check(*arguments)
        with torch.no_grad():
            return function(*arguments)

    return kernel


def _triton_runs_on(device_type: str) -> bool:
    if importlib.util.find_spec("triton") is None:
        return False
    if device_type == "cuda":
        return True
    import triton

    return bool(triton.knobs.runtime.interpret)  # then kernels are interpreted, on CPU tensors


def backends(op: str, device: str | torch.device = "cpu") -> list[str]:
    """Return the names of an op's kernels on a device. The first one is used.

    >>> mpkernels.backends("unscale_", "cuda")
    ['native', 'triton', 'reference']
    """
    if op not in _ops:
        raise ValueError(f"backends: op must be one of {', '.join(sorted(_ops))}, got {op!r}")
    device_type = torch.device(device).type
    available = ["reference"]
    if device_type in DEVICES:
        has_triton = importlib.util.find_spec(_ops[op].triton_module) is not None
        if has_triton and _triton_runs_on(device_type):
            available.insert(0, "triton")
        if (op, device_type) in _native:
            available.insert(0, "native")
    return available


_native: set[tuple[str, str]] = set()  # (op, device type) that the loaded library serves


def attach_defaults() -> None:
    """Register which ops the loaded library serves, and attach Triton to the CUDA ops that it lacks. Call it once the
    library is loaded, or known to be absent."""
    for name in (*_ops, *_native_calls):
        serves_all = name in _native_calls and has_kernel(f"{NAMESPACE}::{name}", "CompositeExplicitAutograd")
        for device_type, key in DEVICES.items():
            if serves_all or has_kernel(f"{NAMESPACE}::{name}", key):
                _native.add((name, device_type))
    for op in _ops.values():
        if backends(op.name, "cuda")[0] == "triton":
            _library.impl(op.name, op.triton, "CUDA")


Kernels = dict[tuple[str, str], Callable[..., Any]]  # (op, device type) -> kernel
forced: list[Kernels] = []  # innermost last; only the innermost is on the dispatcher's stack
_pushed: Library | None = None


def _push_innermost() -> None:
    global _pushed
    _pushed = None  # with which its kernels go
    _pushed = Library(NAMESPACE, "IMPL")
    with warnings.catch_warnings():  # torch warns that a kernel is overridden, which is what is wanted
        warnings.simplefilter("ignore", UserWarning)
        for (op, device_type), kernel in forced[-1].items() if forced else ():
            if op in _native_calls:  # called by NativeCall.on alone
                continue
            _pushed.impl(op, kernel, DEVICES[device_type], allow_override=True)


@contextmanager
def force(kernels: Kernels) -> Iterator[None]:
    """Puts kernels on the dispatcher's stack, above the ones that are attached."""
    forced.append(kernels)
    _push_innermost()
    try:
        yield
    finally:
        forced[:] = [each for each in forced if each is not kernels]  # another thread's may have come on top
        _push_innermost()


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Make every op run its ``"native"``, ``"triton"`` or ``"reference"`` kernel inside this context: for tests and bug
    hunts.

    The choice applies to all threads. An op without such a kernel raises NotImplementedError.
    """
    if name not in BACKENDS:
        raise ValueError(f"backend: name must be one of {', '.join(BACKENDS)}, got {name!r}")
    kernels: Kernels = {}
    for op in _ops.values():
        for device_type in DEVICES:
            available = backends(op.name, device_type)
            if name not in available:
                kernels[op.name, device_type] = _refusal(op.name, name, device_type, available)
            elif name != "native":  # which lies on the stack already
                kernels[op.name, device_type] = getattr(op, name)
    with force(kernels):
        yield


def _refusal(op: str, backend: str, device_type: str, available: list[str]) -> Callable[..., Any]:
    def refuse(*arguments: Any) -> Any:
        raise NotImplementedError(f"{op}: no {backend} kernel on {device_type}, only {', '.join(available)}")

    return refuse
