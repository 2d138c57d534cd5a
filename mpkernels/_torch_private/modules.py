"""Tells what a module holds, and which hooks run when it is called."""

from types import MethodType
from typing import Any

import torch

from mpkernels._torch_private.finding import NoClass, look_up

# The parametrization of torch.nn.utils.parametrizations.spectral_norm. Without it: to_mixed needs keep_fp32 there.
SpectralParametrization: type = look_up("torch.nn.utils.parametrizations", "_SpectralNorm", NoClass)


def pre_hooks_of(module: torch.nn.Module) -> list[Any]:
    """Return the hooks that run before a module's forward. Without the attribute: none, and under
    torch.nn.utils.spectral_norm to_mixed needs keep_fp32."""
    return list(getattr(module, "_forward_pre_hooks", {}).values())


_hooks_of_all_modules: tuple[Any, ...] = tuple(
    look_up("torch.nn.modules.module", f"_global_{kind}_hooks", {})
    for kind in ("forward", "forward_pre", "backward", "backward_pre")
)


def are_all_modules_hooked() -> bool:
    """Return whether there are hooks around the forward of every module. Without torch's dicts of such hooks: no."""
    forward, forward_pre, backward, backward_pre = _hooks_of_all_modules
    return bool(forward or forward_pre or backward or backward_pre)


# The methods that run when a module is called. Without the second: only ``__call__`` is checked.
CALLED_BY = tuple(name for name in ("__call__", "_call_impl") if hasattr(torch.nn.Module, name))


def books_of(attributes: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a module's dicts of parameters, buffers and children from its ``__dict__``, so that no parametrization
    runs. Without these attributes: empty dicts, and nothing is fused."""
    return [attributes.get(book, {}) for book in ("_parameters", "_buffers", "_modules")]


def runs_forward_alone(module: torch.nn.Module) -> bool:
    """Return whether a call of the module runs its class's forward and no hooks of the module. Without the dicts of
    hooks: False, and nothing is fused."""
    attributes = vars(module)
    if (
        attributes.get("_forward_hooks", True)
        or attributes.get("_forward_pre_hooks", True)
        or attributes.get("_backward_hooks", True)
        or attributes.get("_backward_pre_hooks", True)
        or attributes.get("_compiled_call_impl") is not None
        or "_call_impl" in attributes
    ):
        return False
    # torch.compile reads module.forward below, and so notices when a forward is set on the module later.
    if "forward" not in attributes and not torch.compiler.is_compiling():
        return True
    forward = module.forward  # no getattr(forward, "__func__", None): torch.compile makes None of that
    return isinstance(forward, MethodType) and forward.__func__ is type(module).forward and forward.__self__ is module
