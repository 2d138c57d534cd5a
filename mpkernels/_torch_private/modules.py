"""What a module holds, and which hooks run when it is called."""

from types import MethodType
from typing import Any

import torch

from mpkernels._torch_private.finding import NoClass, look_up

# The parametrization of torch.nn.utils.parametrizations.spectral_norm. Without it: to_mixed needs keep_fp32 there.
SpectralParametrization: type = look_up("torch.nn.utils.parametrizations", "_SpectralNorm", NoClass)


def pre_hooks_of(module: torch.nn.Module) -> list[Any]:
    """Return what is called before a forward. Without the book: nothing, and under torch.nn.utils.spectral_norm
    to_mixed needs keep_fp32."""
    return list(getattr(module, "_forward_pre_hooks", {}).values())


_hooks_of_all_modules: tuple[Any, ...] = tuple(
    look_up("torch.nn.modules.module", f"_global_{kind}_hooks", {})
    for kind in ("forward", "forward_pre", "backward", "backward_pre")
)


def are_all_modules_hooked() -> bool:
    """Return whether hooks run around the forward of each module. Without torch's books of them: no."""
    forward, forward_pre, backward, backward_pre = _hooks_of_all_modules
    return bool(forward or forward_pre or backward or backward_pre)


# The names by which a module calls itself. Without the second: only ``__call__`` is checked.
CALLED_BY = tuple(name for name in ("__call__", "_call_impl") if hasattr(torch.nn.Module, name))


def books_of(own: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a module's parameters, buffers and children as its ``__dict__`` has them, so that no parametrization is
    run. Without these books: nothing, and nothing is fused."""
    return [own.get(book, {}) for book in ("_parameters", "_buffers", "_modules")]


def runs_forward_alone(module: torch.nn.Module) -> bool:
    """Return whether a call of the module runs its class's forward and no hooks of its own. Without the books of hooks:
    it doesn't, and nothing is fused."""
    own = vars(module)
    if (
        own.get("_forward_hooks", True)
        or own.get("_forward_pre_hooks", True)
        or own.get("_backward_hooks", True)
        or own.get("_backward_pre_hooks", True)
        or own.get("_compiled_call_impl") is not None
        or "_call_impl" in own
    ):
        return False
    if "forward" not in own and not torch.compiler.is_compiling():  # which notices a forward that comes later
        return True
    forward = module.forward  # as torch.compile can follow it: of getattr(forward, "__func__", None) it makes None
    return isinstance(forward, MethodType) and forward.__func__ is type(module).forward and forward.__self__ is module
