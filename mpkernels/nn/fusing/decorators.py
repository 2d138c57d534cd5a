"""Methods beneath their decorators: the function that was written, and the same decorators around another one."""

import inspect
from types import CellType, FunctionType
from typing import Any

from mpkernels.nn.fusing.calls import Method, is_replaced
from mpkernels.nn.fusing.rewrite import NotRewritableError, dressed_as


def innermost(kind: type, name: str) -> FunctionType:
    """Return the function that this class's method was written as, beneath all decorators that keep it."""
    return _layers(kind, name)[-1]


def redecorated(kind: type, name: str, function: FunctionType) -> FunctionType:
    """Return this function with copies of the decorators that the class's method has."""
    *wrappers, written = _layers(kind, name)
    for wrapper in reversed(wrappers):
        written, function = wrapper, _around(function, wrapper, written)
    return function


def unless_replaced(method: Method, decorated: FunctionType) -> FunctionType:
    """Return the decorated method, but that a new one is called in its place, without the old one's decorators."""

    def call(*arguments: Any, **named: Any) -> Any:
        current = getattr(method.kind, method.name) if is_replaced(method) else decorated
        return current(*arguments, **named)

    return dressed_as(decorated, call)  # type: ignore[arg-type]


def is_made_for_subclasses(kind: type, method: Any) -> bool:
    """Return whether a wrapper was put around this method as its class was made. HF's layers do so, for checkpointing,
    and will wrap the method of a subclass in the same way."""
    makers = [vars(it).get("__init_subclass__") for it in kind.__mro__]
    made = [const for it in makers if isinstance(it, classmethod) for const in it.__func__.__code__.co_consts]
    return isinstance(method, FunctionType) and method.__code__ in made and hasattr(method, "__wrapped__")


def _layers(kind: type, name: str) -> list[FunctionType]:
    """Return the wrappers of a method, outermost first, and the function within."""
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
    except ValueError:  # it is empty
        return False


def _around(function: FunctionType, wrapper: FunctionType, before: FunctionType) -> FunctionType:
    """Return the wrapper around this function instead of the one before. All else that it holds is shared with it."""
    cells = tuple(CellType(function) if _holds(cell, before) else cell for cell in wrapper.__closure__ or ())
    copied = FunctionType(wrapper.__code__, wrapper.__globals__, wrapper.__name__, wrapper.__defaults__, cells)
    return dressed_as(wrapper, copied)
