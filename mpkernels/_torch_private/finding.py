"""Looks private names up, and has substitutes for missing ones."""

import importlib
from functools import reduce
from typing import Any


def look_up(module: str, name: str, otherwise: Any) -> Any:
    """Return the attribute ``name`` (which may have dots) of a module of torch's, or ``otherwise`` if it is missing."""
    try:
        return reduce(getattr, name.split("."), importlib.import_module(module))
    except (AttributeError, ImportError):
        return otherwise


class NoClass:
    """A class without instances, in place of a missing one."""


def maybe() -> bool:
    return True
