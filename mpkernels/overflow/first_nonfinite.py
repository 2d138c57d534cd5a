"""Finds the module that was the first to give an inf or NaN."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mpkernels._shared.call_model import refuse_no_model
from mpkernels._shared.parameters import put_on
from mpkernels._shared.tensors_in import tensors_in
from mpkernels._torch_private.modes import are_transforms_active


@dataclass(frozen=True)
class FirstNonFinite:
    module: str  #: the module's name in the model; "" is the model itself
    kind: str
    had_finite_inputs: bool
    has_finite_weights: bool  #: at the time of asking

    def __str__(self) -> str:
        return f"{self.module} ({self.kind})" if self.module else f"the model itself ({self.kind})"


class find_nonfinite:  # noqa: N801 a context manager, like torch.no_grad
    """A context that watches a model's modules and finds the first one whose output holds an inf or NaN.

    ::

        with find_nonfinite(model) as found:
            loss(model(inputs), targets).backward()
        print(found)
        print(scaler.overflow_report(model, found))

    The first module is the one whose forward ends first: a module inside a container comes before the container.
    Outputs may be nested in tuples, lists, dicts and dataclasses. Watching reads each input and output once, and
    doesn't wait for the device; only ``first`` and ``print`` wait.

    A module that returns -inf on purpose, such as a mask, is found, too. Modules inside a compiled module are not seen.
    Scripted modules, and calls within torch.func, are not watched.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        refuse_no_model("find_nonfinite", model)
        self._model = model
        self._calls: list[tuple[str, torch.nn.Module, Tensor | None, Tensor]] = []  # in the order of their ends
        self._inputs: dict[int, list[Tensor | None]] = {}  # id of a module -> flags of its running calls
        self._hooks: list[Any] = []

    def __enter__(self) -> "find_nonfinite":
        self._calls, self._inputs = [], {}
        for name, module in self._model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue
            self._hooks.append(module.register_forward_pre_hook(self._before, with_kwargs=True))
            self._hooks.append(module.register_forward_hook(partial(self._after, name)))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _before(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        self._inputs.setdefault(id(module), []).append(_is_finite((args, kwargs)))

    def _after(self, name: str, module: torch.nn.Module, args: Any, output: Any) -> None:
        inputs, is_finite = self._inputs.get(id(module)), _is_finite(output)
        were_finite = inputs.pop() if inputs else None  # no entry if the call began before the context
        if is_finite is not None:
            self._calls.append((name, module, were_finite, is_finite))

    @property
    def first(self) -> FirstNonFinite | None:
        """The first module whose output was not finite; None if all outputs were finite. Waits for the device."""
        flags = _together([is_finite for *_, is_finite in self._calls]).tolist() if self._calls else []
        if all(flags):
            return None
        name, module, were_finite, _ = self._calls[flags.index(False)]
        return FirstNonFinite(
            module=name,
            kind=type(module).__name__,
            had_finite_inputs=were_finite is None or bool(were_finite),
            has_finite_weights=all(bool(param.isfinite().all()) for param in module.parameters(recurse=False)),
        )

    def __str__(self) -> str:
        first = self.first
        if not self._calls:
            return "No module of the model was called inside this context."
        if first is None:
            return f"All outputs of {len(self._calls)} calls of modules were finite."
        inputs = "finite" if first.had_finite_inputs else "not finite"
        weights = "" if first.has_finite_weights else "; its weights are not finite"
        return f"{first} was the first to give an inf or NaN; its inputs were {inputs}{weights}."


@torch.no_grad()
def _is_finite(value: Any) -> Tensor | None:
    """Return, on the device, whether all floating-point tensors in a value are finite; None if it holds none."""
    if are_transforms_active():
        return None
    tensors = [it for it in tensors_in(value) if it.is_floating_point() or it.is_complex()]
    flags = [_numbers_of(tensor).isfinite().all() for tensor in tensors]
    return _together(flags).all() if flags else None


def _together(flags: list[Tensor]) -> Tensor:
    device = flags[-1].device
    return torch.stack([put_on(device, flag) for flag in flags])


def _numbers_of(tensor: Tensor) -> Tensor:
    """Return the tensor's numbers in a layout and dtype that isfinite supports."""
    if tensor.layout == torch.sparse_coo:
        tensor = tensor.coalesce()
    if tensor.is_nested or tensor.layout != torch.strided:
        tensor = tensor.values()
    return tensor.float() if tensor.itemsize == 1 else tensor
