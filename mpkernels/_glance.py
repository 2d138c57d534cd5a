"""A look at many of Python's objects in one call to C++ (csrc/adamw/glance_python.cpp)."""

import ctypes
import functools
from collections.abc import Callable
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpkernels._extension import LIBRARY

WORDS = 4  # int64s that tell of a parameter and its grad; csrc/adamw/glance.h names them


class _Functions(NamedTuple):
    """None: the library is missing, or torch shows C++ nothing of its tensors, as older ones."""

    holds: Callable[..., int] | None = None
    glance: Callable[..., int] | None = None
    describe: Callable[[Tensor, Tensor, Tensor | None, object], bytes | None] | None = None
    activate: Callable[[Tensor, str], bool] | None = None


@functools.cache
def _functions() -> _Functions:
    library: Any = None if LIBRARY is None else ctypes.PyDLL(str(LIBRARY))
    if not hasattr(library, "mpkernels_describe"):
        return _Functions()
    library.mpkernels_holds.argtypes = [ctypes.py_object] * 2
    library.mpkernels_glance.argtypes = [*[ctypes.py_object] * 4, ctypes.c_void_p]
    library.mpkernels_glance_with.argtypes = [ctypes.py_object] * 3
    library.mpkernels_describe.restype = library.mpkernels_activate.restype = ctypes.py_object
    capsule = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    if capsule is None or not library.mpkernels_glance_with(capsule, Tensor, torch.nn.Parameter):
        return _Functions(library.mpkernels_holds)
    c = library.mpkernels_describe(), library.mpkernels_activate()
    return _Functions(library.mpkernels_holds, library.mpkernels_glance, *c)


def can_see() -> bool:
    """Not what a dispatch mode wants to hear of."""
    return torch._C._len_torch_dispatch_stack() == 0 and _functions().glance is not None


def at(
    params: list[Tensor], known: list[Tensor], stepped: list[Tensor], grads: list[Tensor | None], seen: Tensor
) -> bool:
    """Whether ``params`` are still the ``known`` ones, those in ``stepped`` and no others have grads, and all of these
    are plain. Fills ``seen``, and ``grads`` as far as it gets."""
    glance = _functions().glance
    assert glance is not None  # can_see was asked
    return bool(glance(params, known, stepped, grads, seen.data_ptr()))


def describer() -> Callable[[Tensor, Tensor, Tensor | None, object], bytes | None] | None:
    """Tells the calls of linear_act apart: gives bytes for ordinary ones, else None."""
    return _functions().describe


def activator() -> Callable[[Tensor, str], bool] | None:
    """Puts f(z) where z is, if that takes no second thread, and tells whether it did. Nobody hears of it."""
    return _functions().activate


def held(states: dict[Tensor, dict[str, Any]]) -> list[object]:
    """Each parameter, followed by what its state holds. A user may keep something else there."""
    return [each for param, state in states.items() if type(state) is dict for each in (param, *state.values())]


def holds(states: dict[Tensor, dict[str, Any]], known: list[object]) -> bool:
    """Whether that is what is known, in its order."""
    holds_in_c = _functions().holds
    if holds_in_c is not None and isinstance(states, dict):
        return bool(holds_in_c(states, known))
    found = held(states)
    return len(found) == len(known) and all(map(is_, found, known))
