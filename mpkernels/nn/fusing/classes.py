"""Subclasses with rewritten methods, which take the place of a module's class. The decorators of a method are copied
around its rewritten form."""

import copyreg
import inspect
from contextlib import suppress
from types import CellType, FunctionType
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from mpkernels.nn.fusing import calls
from mpkernels.nn.fusing.choices import KEPT
from mpkernels.nn.fusing.rewrite import NotRewritableError, dressed_as, rewrite
from mpkernels.nn.fusing.safe_lookup import FUSED

Recipe = tuple[Any, ...]
"""Each method's name and its chosen sites: index, text and, if it is a loop, the chosen runs of its modules."""


class Record(NamedTuple):
    """What a class was fused from."""

    plain: type
    recipe: Recipe
    methods: tuple[Any, ...]  #: the plain class's methods, for which somebody may substitute others


_made: WeakValueDictionary[Record, type] = WeakValueDictionary()


def record_of(kind: type) -> Record | None:
    """Return what a class was fused from. Return None for any other class, even if a base of it is fused."""
    record: Record | None = vars(kind).get(FUSED)
    return record


def fused_class(plain: type, recipe: Recipe) -> type:
    """Return the subclass that runs the recipe. Modules with the same class and recipe share it, and so their compiled
    code. Names stay, because tools look classes up by name. Raise a TypeError if the class allows no subclass."""
    record = Record(plain, recipe, _methods_now(plain, recipe))
    kind = _made.get(record)
    if kind is None:
        space = {name: getattr(plain, name) for name in ("__module__", "__qualname__", "__doc__")}
        space |= {"__reduce_ex__": _reduce, "__setattr__": _set_attribute, FUSED: record}
        space |= {name: _fused_method(plain, name, chosen) for name, chosen in recipe}
        try:
            kind = _made[record] = type(plain)(plain.__name__, (plain,), space)
        except Exception as error:  # whatever its __init_subclass__ or its metaclass raises
            raise TypeError(str(error)) from error
    return kind


def is_stale(kind: type) -> bool:
    """Return whether methods of the plain class were replaced since this fused class was made."""
    record = record_of(kind)
    return record is not None and _methods_now(record.plain, record.recipe) != record.methods


def become(module: Any, kind: type) -> None:
    """Give a module this class, past any ``__setattr__`` of its own."""
    object.__setattr__(module, "__class__", kind)


def plain_class(kind: type) -> type:
    """Return the class without fused ones among its bases. A class that others have derived from a fused one, as
    fully_shard and parametrize do, is made anew from the plain one. It mustn't have a forward of its own, because that
    may call the fused one."""
    record = record_of(kind)
    if record is not None:
        return plain_class(record.plain)
    if not is_fused(kind):
        return kind
    space = {name: value for name, value in vars(kind).items() if name not in ("__dict__", "__weakref__")}
    if "forward" in space and is_made_for_subclasses(kind, space["forward"]):
        del space["forward"]  # the new class wraps it again
    return type(kind)(kind.__name__, tuple(map(plain_class, kind.__bases__)), space)


def covers_fused_forward(kind: type) -> bool:
    """Return whether others have derived a class with a forward of its own from a fused one."""
    derived = [it for it in kind.__mro__ if record_of(it) is None and is_fused(it)]
    return any("forward" in vars(it) and not is_made_for_subclasses(it, vars(it)["forward"]) for it in derived)


def is_fused(kind: type) -> bool:
    return any(record_of(it) is not None for it in kind.__mro__)


def _reduce(self: Any, protocol: Any) -> Any:
    """Pickle and copy the module by its plain class: pickle finds classes by name, and the fused one has none."""
    kind: Any = next(it for it in type(self).__mro__ if record_of(it) is not None)
    reduced = super(kind, self).__reduce_ex__(protocol)
    usual = copyreg.__newobj__, (type(self),)  # type: ignore[attr-defined]
    is_usual = isinstance(reduced, tuple) and reduced[:2] == usual
    return (restore, vars(kind)[FUSED][:2], *reduced[2:]) if is_usual else reduced


def _set_attribute(self: Any, name: str, value: Any) -> None:
    """Set an attribute of the module. A new layer or activation may change what computes its sites."""
    if callable(value):
        vars(self).pop(KEPT, None)
    kind: Any = next(it for it in type(self).__mro__ if record_of(it) is not None)
    super(kind, self).__setattr__(name, value)


def restore(plain: Any, recipe: Recipe) -> Any:
    """Return a new module of a fused class, for pickle and copy to fill; of the plain class if its source has changed
    since."""
    module = plain.__new__(plain)
    with suppress(NotRewritableError, TypeError, AttributeError):
        become(module, fused_class(plain, recipe))
    return module


def _methods_now(kind: type, recipe: Recipe) -> tuple[Any, ...]:
    """Return the recipe's methods as the class has them now, with all decorators."""
    return tuple(inspect.getattr_static(kind, name, None) for name, _ in recipe)


def _fused_method(kind: type, name: str, chosen: Any) -> FunctionType:
    """Return the rewritten method inside copies of the method's decorators."""
    *wrappers, written = _unwrapped(kind, name)
    method = calls.Method(kind, name, getattr(kind, name), written)
    fused = rewrite(written, chosen, method)
    for wrapper in reversed(wrappers):
        written, fused = wrapper, _around(fused, wrapper, written)

    def call(*arguments: Any, **named: Any) -> Any:  # if the method was replaced, none of its old decorators runs
        current = getattr(kind, name)
        return (fused if current is method.value else current)(*arguments, **named)

    return dressed_as(fused, call) if wrappers else fused  # type: ignore[arg-type]


def is_made_for_subclasses(kind: type, method: Any) -> bool:
    """Return whether ``__init_subclass__`` has wrapped this method. HF's layers do so for checkpointing, and will wrap
    the method of a subclass in the same way."""
    makers = [vars(it).get("__init_subclass__") for it in kind.__mro__]
    made = [const for it in makers if isinstance(it, classmethod) for const in it.__func__.__code__.co_consts]
    return isinstance(method, FunctionType) and method.__code__ in made and hasattr(method, "__wrapped__")


def innermost(kind: type, name: str) -> FunctionType:
    """Return the function beneath all decorators of this class's method."""
    return _unwrapped(kind, name)[-1]


def _unwrapped(kind: type, name: str) -> list[FunctionType]:
    """Return the wrappers of a method, the outermost first, and last the function within."""
    method = inspect.getattr_static(kind, name)
    while is_made_for_subclasses(kind, method):
        method = method.__wrapped__
    wrappers: list[FunctionType] = []
    while isinstance(method, FunctionType) and "__wrapped__" in vars(method):
        wrappers.append(method)
        method = vars(method)["__wrapped__"]
        if not any(_holds(cell, method) for cell in wrappers[-1].__closure__ or ()):
            raise NotRewritableError("is decorated, and the decorator keeps it in no cell of its closure")
    if not isinstance(method, FunctionType):
        raise NotRewritableError("is no Python function")
    if method.__code__.co_freevars:
        raise NotRewritableError("is a closure, or calls super()")
    return [*wrappers, method]


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
