"""Makes a subclass of a model's class whose forward runs under autocast."""

import copyreg
import functools
from types import MethodType
from typing import Any

import torch
from torch import nn

from mpkernels.amp.autocasting import machines_device
from mpkernels.ops._autocast import has_autocast


class UnderAutocast:
    """Runs under autocast a forward that was set on a model and isn't the model's method."""

    def __init__(self, model: Any, forward: Any, dtype: torch.dtype) -> None:
        functools.update_wrapper(self, forward)
        self._model, self._forward, self._dtype = model, forward, dtype

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.amp.autocast(_device_type(self._model), dtype=self._dtype):
            return self._forward(*args, **kwargs)


def _under_autocast(function: Any, dtype: torch.dtype) -> Any:
    @functools.wraps(function)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with torch.amp.autocast(_device_type(self), dtype=dtype):
            return function(self, *args, **kwargs)

    forward.before_autocast = function  # type: ignore[attr-defined]
    return forward


_CODE = _under_autocast(lambda self: None, torch.bfloat16).__code__


def own_forward_of(model: Any) -> Any:
    """Return the forward that was set on a model, without our autocast; None if none was set."""
    forward = vars(model).get("forward")
    if isinstance(forward, UnderAutocast):
        return forward._forward
    function = getattr(forward, "__func__", None)
    is_ours = getattr(function, "__code__", None) is _CODE  # a wrapper by functools.wraps has our attributes, too
    return MethodType(function.before_autocast, model) if is_ours else forward  # type: ignore[union-attr]


class Mixed:
    """Base of the class that ``to_mixed`` gives a model: a subclass of the model's class, with the same name, whose
    forward runs under autocast."""

    _mixed_class: type[nn.Module]
    _mixed_dtype: torch.dtype

    def __setattr__(self, name: str, value: Any) -> None:
        """Put a forward that is set on the model under autocast, too: TRL's losses and Accelerate set one. A method of
        the model stays a method, so that a deep copy of the model gets a method of its own."""
        if name == "forward" and isinstance(value, MethodType) and value.__self__ is self:
            value = MethodType(_under_autocast(value.__func__, self._mixed_dtype), self)
        elif name == "forward":
            value = UnderAutocast(self, value, self._mixed_dtype)
        super().__setattr__(name, value)

    def __reduce_ex__(self, protocol: Any) -> Any:  # pickle can't find a class made here by its name
        reduced: Any = super().__reduce_ex__(protocol)
        make, arguments, *rest = reduced
        if make is copyreg.__newobj__:  # type: ignore[attr-defined]
            return _rebuild, (self._mixed_class, self._mixed_dtype, *arguments[1:]), *rest
        return _rebuild_of, (make, arguments, self._mixed_dtype), *rest


@functools.cache
def mixed_class(kind: Any, dtype: torch.dtype) -> type[nn.Module]:
    body = {
        "forward": _under_autocast(kind.forward, dtype),
        "_mixed_class": kind,
        "_mixed_dtype": dtype,
        "__doc__": kind.__doc__,
    }
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (Mixed, kind), body | names)


def _rebuild(kind: Any, dtype: torch.dtype, *arguments: Any) -> nn.Module:
    made: nn.Module = object.__new__(mixed_class(kind, dtype))
    return made


def _rebuild_of(make: Any, arguments: Any, dtype: torch.dtype) -> nn.Module:
    """Rebuild a model whose original class, such as a fused one, can't be found by its name either."""
    made: nn.Module = make(*arguments)
    kind: Any = type(made)
    made.__class__ = mixed_class(kind, dtype)
    return made


def _device_type(model: nn.Module) -> str:
    """Return the type of device of the model's weights. A replica of DataParallel has no weights of its own."""
    for param in model.parameters():
        if has_autocast(param.device.type):
            return param.device.type
    return machines_device()
