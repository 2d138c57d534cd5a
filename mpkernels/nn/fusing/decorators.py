"""Finds the function beneath a method's decorators, and puts copies of the decorators around another function."""

import inspect
from types import CellType, FunctionType
from typing import Any

from mpkernels.nn.fusing.calls import Method, is_replaced
from mpkernels.nn.fusing.rewrite import NotRewritableError, dressed_as


def innermost(kind: type, name: str) -> FunctionType:
    """Return the function beneath all decorators of this class's method."""
    return _layers(kind, name)[-1]


def redecorated(kind: type, name: str, function: FunctionType) -> FunctionType:
    """Return this function inside copies of the decorators of the class's method."""
    *wrappers, written = _layers(kind, name)
    for wrapper in reversed(wrappers):
        written, function = wrapper, _around(function, wrapper, written)
    return function


def unless_replaced(method: Method, decorated: FunctionType) -> FunctionType:
    """Return a function that calls the decorated method or, if the plain class's method was replaced, the new one
    without these decorators."""

    def call(*arguments: Any, **named: Any) -> Any:
        current = getattr(method.kind, method.name) if is_replaced(method) else decorated
        return current(*arguments, **named)

    return dressed_as(decorated, call)  # type: ignore[arg-type]


def is_made_for_subclasses(kind: type, method: Any) -> bool:
    """Return whether ``__init_subclass__`` has wrapped this method. HF's layers do so for checkpointing, and will wrap
    the method of a subclass in the same way."""
    makers = [vars(it).get("__init_subclass__") for it in kind.__mro__]
    made = [const for it in makers if isinstance(it, classmethod) for const in it.__func__.__code__.co_consts]
    return isinstance(method, FunctionType) and method.__code__ in made and hasattr(method, "__wrapped__")


def _layers(kind: type, name: str) -> list[FunctionType]:
    """Return the wrappers of a method, the outermost first, and last the function within."""
    method = inspect.getattr_static(kind, name)
    while is_made_for_subclasses(kind, method):
        method = method.__wrapped__
    layers: list[FunctionType] = []
    while isinstance(method, FunctionType) and "__wrapped__" in vars(method):
        layers.append(method)
        method = vars(method)["__wrapped__"]
        if not any(_holds(cell, method) for cell in layers[-1].__closure__ or ()):
            raise NotRewritableError("is decorated, and the decorator keeps it in no cell of its closure")
    if not isinstance(method, FunctionType):
        raise NotRewritableError("is no Python function")
    if method.__code__.co_freevars:
        raise NotRewritableError("is a closure, or calls super()")
    return [*layers, method]


def _holds(cell: CellType, value: Any) -> bool:
    try:
        return cell.cell_contents is value
    except ValueError:  # the cell is empty
        return False


def _around(function: FunctionType, wrapper: FunctionType, before: FunctionType) -> FunctionType:
    """Return a copy of the wrapper that wraps this function instead of ``before``, and shares all else with it."""
    cells = tuple(CellType(function) if _holds(cell, before) else cell for cell in wrapper.__closure__ or ())
    copied = FunctionType(wrapper.__code__, wrapper.__globals__, wrapper.__name__, wrapper.__defaults__, cells)
    return dressed_as(wrapper, copied)
