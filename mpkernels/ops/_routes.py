"""Chooses what runs when an op is called: by default, by device where devices differ, or as a user asks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from mpkernels._torch_private.devices import when_cuda_begins
from mpkernels._torch_private.ops import find_kernel, has_kernel
from mpkernels.ops import _devices, _dispatcher, _registry
from mpkernels.ops._devices import capabilities, device_of, left_out
from mpkernels.ops._dispatcher import DEVICES, NAMESPACE, Kernels, force
from mpkernels.ops._registry import BACKENDS, Op


def attach_defaults() -> None:
    """Register which ops the loaded library serves, and attach Triton to the CUDA ops that it lacks. Call it once the
    library is loaded, or known to be absent."""
    for name in (*_registry._ops, *_registry._native_calls):
        serves_all = name in _registry._native_calls and has_kernel(f"{NAMESPACE}::{name}", "CompositeExplicitAutograd")
        for device_type, key in DEVICES.items():
            if serves_all or has_kernel(f"{NAMESPACE}::{name}", key):
                _registry._native.add((name, device_type))
    for op in _registry._ops.values():
        if _registry.kernels_on(torch.device("cuda"), op.name)[0] == "triton":
            _registry._library.impl(op.name, op.triton, "CUDA")
    when_cuda_begins(_go_by_cuda_devices)


def _go_by_cuda_devices() -> None:
    _devices.decide()
    go_by_devices("cuda")


_by_device: dict[str, object] = {}  # device type -> routes


def go_by_devices(device_type: str) -> None:
    """Where an op's first kernel can't run on one of the devices, make the op run the first kernel that the device at
    hand can run. On most machines there is no such op, and no call looks up its device."""
    _dispatcher.pop_innermost()  # else forced kernels would be taken for C++'s
    _by_device.pop(device_type, None)
    routes = {
        (op.name, device_type): _route(op, device_type)
        for op in _registry._ops.values()
        if not _runs_everywhere(op.name, _attached(op.name, device_type), device_type)
    }
    _by_device[device_type] = _dispatcher.push(routes)
    _dispatcher.push_innermost()


def _attached(op: str, device_type: str) -> str:
    is_native = (op, device_type) in _registry._native
    return "native" if is_native else _registry.kernels_on(torch.device(device_type), op)[0]


def _runs_everywhere(op: str, kernel: str, device_type: str) -> bool:
    devices = {*capabilities, *left_out}
    return all(kernel in _registry.kernels_on(device, op) for device in devices if device.type == device_type)


def _route(op: Op, device_type: str, only: str | None = None) -> Callable[..., Any]:
    """Return a kernel that runs the first one which can run on the tensors' device, or the only one that may."""
    native = _native_kernel(op.name, device_type)

    def run(*arguments: Any) -> Any:
        device = device_of(arguments) or torch.device(device_type)
        available = _registry.kernels_on(device, op.name)
        if only is None:
            _devices.warn_once(device)
        elif only not in available:
            why = left_out[device] if only == "native" else f"it needs compute capability {_devices.ANY_TRITON}"
            raise NotImplementedError(
                f"{op.name}: the {only} kernel can't run on {device}, only {', '.join(available)}: {why}"
            )
        kernel = only or available[0]
        return native(*arguments) if kernel == "native" else getattr(op, kernel)(*arguments)

    return run


def _native_kernel(op: str, device_type: str) -> Callable[..., Any]:
    """Return C++'s kernel, to be called past the dispatcher, or the reference if there is none."""
    is_there = (op, device_type) in _registry._native
    kernel = find_kernel(f"{NAMESPACE}::{op}", DEVICES[device_type]) if is_there else None
    return kernel or _registry._ops[op].reference


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Make every op run its ``"native"``, ``"triton"`` or ``"reference"`` kernel inside this context: for tests and bug
    hunts.

    The choice applies to all threads. An op without such a kernel raises NotImplementedError.
    """
    if name not in BACKENDS:
        raise ValueError(f"backend: name must be one of {', '.join(BACKENDS)}, got {name!r}")
    kernels: Kernels = {}
    for op in _registry._ops.values():
        for device_type in DEVICES:
            available = _registry.kernels_on(torch.device(device_type), op.name)
            if name not in available:
                kernels[op.name, device_type] = _refusal(op.name, name, device_type, available)
            elif not _runs_everywhere(op.name, name, device_type):
                kernels[op.name, device_type] = _route(op, device_type, only=name)
            elif name != "native":  # the native one is on the stack already
                kernels[op.name, device_type] = getattr(op, name)
    with force(kernels):
        yield


def _refusal(op: str, backend: str, device_type: str, available: list[str]) -> Callable[..., Any]:
    def refuse(*arguments: Any) -> Any:
        raise NotImplementedError(f"{op}: no {backend} kernel on {device_type}, only {', '.join(available)}")

    return refuse
