"""Subclasses with a rewritten forward, which take the place of a module's class."""

import copyreg
from contextlib import suppress
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from mpkernels.nn.fusing.decision import Methods, Recipe, methods_now, methods_of
from mpkernels.nn.fusing.decorators import is_made_for_subclasses
from mpkernels.nn.fusing.rewrite import NotRewritableError
from mpkernels.nn.fusing.safe_lookup import FUSED


class Record(NamedTuple):
    """What a class was fused from."""

    plain: type
    recipe: Recipe


_METHODS = "mpkernels_fused_methods"
_made: WeakValueDictionary[tuple[Record, Methods], type] = WeakValueDictionary()


def record_of(kind: type) -> Record | None:
    """Return what a class was fused from. Return None for any other class, even if a base of it is fused."""
    record: Record | None = vars(kind).get(FUSED)
    return record


def fused_class(plain: type, recipe: Recipe) -> type:
    """Return the subclass that runs the recipe. Modules with the same class and recipe share it, and so their compiled
    code. Names stay, because tools look classes up by name. Raise a TypeError if the class allows no subclass."""
    record, methods = Record(plain, recipe), methods_now(plain, recipe)
    kind = _made.get((record, methods))
    if kind is None:
        space = {name: getattr(plain, name) for name in ("__module__", "__qualname__", "__doc__")}
        space |= {"__reduce_ex__": _reduce, FUSED: record, _METHODS: methods, **methods_of(plain, recipe)}
        try:
            kind = _made[record, methods] = type(plain)(plain.__name__, (plain,), space)
        except Exception as error:  # whatever its __init_subclass__ or its metaclass raises
            raise TypeError(str(error)) from error
    return kind


def is_stale(kind: type) -> bool:
    """Return whether methods of the plain class were replaced since this fused class was made."""
    record = record_of(kind)
    return record is not None and methods_now(*record) != vars(kind)[_METHODS]


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
    return (restore, record_of(kind), *reduced[2:]) if is_usual else reduced


def restore(plain: Any, recipe: Recipe) -> Any:
    """Return a new module of a fused class, for pickle and copy to fill; of the plain class if its source has changed
    since."""
    module = plain.__new__(plain)
    with suppress(NotRewritableError, TypeError, AttributeError):
        become(module, fused_class(plain, recipe))
    return module
