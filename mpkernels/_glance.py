"""A look at many of Python's objects in one call to C++ (csrc/glance_python.cpp)."""

import ctypes
import functools
from collections.abc import Callable
from operator import is_
from typing import Any

import torch
from torch import Tensor

from mpkernels._extension import LIBRARY

WORDS = 4  # int64s that tell of a parameter and its grad; csrc/glance.h names them


@functools.cache
def _functions() -> tuple[Callable[..., int] | None, Callable[..., int] | None]:
    """None: the library is missing, or torch shows C++ nothing of its tensors, as older ones."""
    library = ctypes.PyDLL(str(LIBRARY)) if LIBRARY.exists() else None
    holds, glance = getattr(library, "mpkernels_holds", None), getattr(library, "mpkernels_glance", None)
    if holds is None or glance is None:
        return None, None
    holds.argtypes = [ctypes.py_object] * 2
    glance.argtypes = [*[ctypes.py_object] * 4, ctypes.c_void_p]
    begin: Any = library.mpkernels_glance_with  # type: ignore[union-attr]
    begin.argtypes = [ctypes.py_object] * 3
    capsule = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    return holds, glance if capsule is not None and begin(capsule, Tensor, torch.nn.Parameter) else None


def can_see() -> bool:
    """Not what a dispatch mode wants to hear of."""
    return torch._C._len_torch_dispatch_stack() == 0 and _functions()[1] is not None


def at(
    params: list[Tensor], known: list[Tensor], stepped: list[Tensor], grads: list[Tensor | None], seen: Tensor
) -> bool:
    """Whether ``params`` are still the ``known`` ones, those in ``stepped`` and no others have grads, and all of these
    are plain. Fills ``seen``, and ``grads`` as far as it gets."""
    _, glance = _functions()
    assert glance is not None  # can_see was asked
    return bool(glance(params, known, stepped, grads, seen.data_ptr()))


def held(states: dict[Tensor, dict[str, Any]]) -> list[object]:
    """Each parameter, followed by what its state holds. A user may keep something else there."""
    return [each for param, state in states.items() if type(state) is dict for each in (param, *state.values())]


def holds(states: dict[Tensor, dict[str, Any]], known: list[object]) -> bool:
    """Whether that is what is known, in its order."""
    holds_in_c, _ = _functions()
    if holds_in_c is not None and isinstance(states, dict):
        return bool(holds_in_c(states, known))
    found = held(states)
    return len(found) == len(known) and all(map(is_, found, known))
