"""Looks values up without running anybody's code: no property, ``__getattr__`` or lazy module is asked."""

from inspect import getattr_static
from types import MemberDescriptorType, ModuleType
from typing import Any

from torch.nn import Module

from mpkernels._torch_private.modules import books_of
from mpkernels.nn.fusing.originals import MODULE_GETATTR

UNSEEN: Any = type("Unseen", (), {})()
"""Stands for a value that isn't there, or that only code would tell."""


FUSED = "mpkernels_fused"
"""The attribute of a fused class that says what it was made of."""


def has_plain_attributes(kind: type) -> bool:
    """Return whether modules of this class look attributes up as torch's modules do, and run no other code."""
    return _defined(kind, "__getattribute__") is object.__getattribute__ and _defined(kind, "__getattr__") in (
        MODULE_GETATTR,
        UNSEEN,
    )


def own_values(value: Any) -> dict[str, Any]:
    """Return the object's own attributes, without its class's. Nothing for objects that have no ``__dict__``."""
    try:
        own: dict[str, Any] = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return own


def attribute_of(owner: Any, name: str) -> Any:
    """Return an attribute. UNSEEN if only running code would tell, and for UNSEEN."""
    kind, own = type(owner), own_values(owner)
    if owner is UNSEEN or issubclass(kind, type):
        return UNSEEN
    if issubclass(kind, ModuleType):
        return own.get(name, UNSEEN)
    if _defined(kind, "__getattribute__") is not object.__getattribute__:
        return UNSEEN
    found = getattr_static(owner, name, UNSEEN)
    if type(found) is MemberDescriptorType:  # an attribute in __slots__
        return found.__get__(owner, kind)
    if found is UNSEEN:
        if not issubclass(kind, Module) or not has_plain_attributes(kind):
            return UNSEEN
        return next((book[name] for book in books_of(own) if name in book), UNSEEN)  # as torch's own __getattr__
    if name in own and found is own[name]:
        return found
    if type(found) is staticmethod:
        return found.__func__
    return UNSEEN if hasattr(type(found), "__get__") and type(found) is not type else found


def _defined(kind: type, name: str) -> Any:
    return next((vars(it)[name] for it in kind.__mro__ if name in vars(it)), UNSEEN)
