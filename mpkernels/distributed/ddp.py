"""Finds the parameters whose grads a DistributedDataParallel exchanges. A parameter doesn't show that, so all wrappers
are tracked."""

import gc
from collections.abc import Sequence
from functools import cache
from typing import Any
from weakref import WeakSet

from torch import Tensor, distributed
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

_wrappers: WeakSet[DistributedDataParallel] = WeakSet()
_made = 0


@cache
def watch() -> None:
    """Find the wrappers that exist, and register those that will be made."""
    if distributed.is_available() and distributed.is_initialized():  # else there is none yet
        for it in gc.get_objects():
            if issubclass(type(it), DistributedDataParallel):
                _note(it)
    register_module_module_registration_hook(_note)


def _note(module: Any, name: str = "", submodule: Any = None) -> None:
    global _made
    if isinstance(module, DistributedDataParallel):
        _wrappers.add(module)
        _made += 1


def made() -> int:
    """Return how many wrappers were made so far."""
    return _made


def refuse(op: str, params: Sequence[Tensor]) -> None:
    exchanged = {id(param) for wrapper in list(_wrappers) for param in _exchanged_by(wrapper)}
    for i, param in enumerate(params):
        if id(param) in exchanged:
            raise RuntimeError(
                f"{op}: params[{i}] of shape {tuple(param.shape)} must not be DistributedDataParallel's, which sums up "
                "grads after they are released; leave it out, or end it by the remove() of what release_grads returned"
            )


def _exchanged_by(wrapper: DistributedDataParallel) -> list[Tensor]:
    ignored = getattr(wrapper, "parameters_to_ignore", ())
    return [param for name, param in wrapper.module.named_parameters() if name not in ignored]
