"""Attributes that an optimizer shows as its own, though another object has them."""

from typing import Any


class AttributeOf:
    """An attribute that stands for one of the same name, on the object that the attribute ``holder`` names."""

    def __init__(self, holder: str) -> None:
        self._holder = holder

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, optimizer: Any, kind: type | None = None) -> Any:
        return self if optimizer is None else getattr(getattr(optimizer, self._holder), self._name)

    def __set__(self, optimizer: Any, value: Any) -> None:
        setattr(getattr(optimizer, self._holder), self._name, value)
