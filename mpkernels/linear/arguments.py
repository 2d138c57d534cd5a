"""Checks of what users give to layers and to their functions. Each error names who was called, the argument, what was
wanted, what came, and where it belongs if that is plain."""

from collections.abc import Mapping
from numbers import Real

from torch import Tensor
from torch.nn import Module

from mpkernels.ops.linear.activations import ACTIVATIONS


def tensor(who: str, name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        meant = hint(value)
        raise TypeError(f"{who}: {name} must be a tensor, got {repr(value) if meant else type(value).__name__}{meant}")


def flag(who: str, name: str, value: object) -> None:
    """Require a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{who}: {name} must be a bool, got {value!r}{hint(value)}")


def layer(who: str, widths: Mapping[str, object], bias: object, device: object, dtype: object) -> None:
    """Check what all layers are made of; torch looks at sizes, devices and dtypes that are some."""
    for name, value in widths.items():
        width(who, name, value)
    flag(who, "bias", bias)
    for name, value in (("device", device), ("dtype", dtype)):
        if meant := hint(value):
            raise TypeError(f"{who}: {name} must be a torch.{name}, got {value!r}{meant}")


def width(who: str, name: str, value: object, wanted: str = "an int") -> None:
    if isinstance(value, bool):
        raise TypeError(f"{who}: {name} must be {wanted}, got {value}; did you mean bias={value}?")
    if not hasattr(type(value), "__index__"):
        raise TypeError(f"{who}: {name} must be {wanted}, got {value!r}{hint(value)}")


def probability(who: str, name: str, value: object) -> None:
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, (float, int, Real)):
        raise TypeError(f"{who}: {name} must be a number, got {value!r}{hint(value)}")
    if not 0 <= float(value) <= 1:
        raise ValueError(f"{who}: {name} must be between 0 and 1, got {value}")


def hint(value: object) -> str:
    """Return a question for who gave an activation in another argument's place; empty for other values."""
    if isinstance(value, str):
        return f"; did you mean activation={value.lower()!r}?" if value.lower() in ACTIVATIONS else ""
    is_module = isinstance(value, Module) or (isinstance(value, type) and issubclass(value, Module))
    return f"; did you mean activation={value!r}?" if is_module else ""
