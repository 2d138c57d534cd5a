"""Puts kernels above the attached ones, on the stack of torch's dispatcher."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.library import Library

NAMESPACE = "mpkernels"
DEVICES = {
    "cpu": "CPU",
    "cuda": "CUDA",
}  # torch.device.type -> dispatch key, where kernels other than the reference exist

definitions = Library(NAMESPACE, "DEF")

Kernels = dict[tuple[str, str], Callable[..., Any]]  # (op, device type) -> kernel
forced: list[Kernels] = []  # innermost last; only the innermost is on the dispatcher's stack
off_stack: set[str] = set()  # ops whose kernels only NativeCall.on looks up
_pushed: Library | None = None


def push(kernels: Kernels) -> Library:
    """Put kernels on the stack, for as long as the result lives."""
    library = Library(NAMESPACE, "IMPL")
    with warnings.catch_warnings():  # torch warns that a kernel is overridden, which is what is wanted
        warnings.simplefilter("ignore", UserWarning)
        for (op, device_type), kernel in kernels.items():
            if op not in off_stack:
                library.impl(op, kernel, DEVICES[device_type], allow_override=True)
    return library


def push_innermost() -> None:
    global _pushed
    pop_innermost()
    _pushed = push(forced[-1] if forced else {})


def pop_innermost() -> None:
    global _pushed
    _pushed = None  # which takes its kernels off the stack


@contextmanager
def force(kernels: Kernels) -> Iterator[None]:
    """Put kernels on the dispatcher's stack for this context, above the attached ones."""
    forced.append(kernels)
    push_innermost()
    try:
        yield
    finally:
        forced[:] = [other for other in forced if other is not kernels]  # another thread's may have come on top
        push_innermost()
