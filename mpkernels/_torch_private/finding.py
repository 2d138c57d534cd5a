"""Looking a private name up, and stand-ins for what isn't there."""

import importlib
from functools import reduce
from typing import Any


def look_up(module: str, name: str, otherwise: Any) -> Any:
    """Return what a module of torch's has under a name, which may have dots, or ``otherwise``."""
    try:
        return reduce(getattr, name.split("."), importlib.import_module(module))
    except (AttributeError, ImportError):
        return otherwise


class NoClass:
    """A class without instances, in place of a missing one."""


def maybe() -> bool:
    return True
