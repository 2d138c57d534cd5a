"""What a forward keeps in memory for its backward."""

from typing import Any, NamedTuple

from torch import Tensor, nn

from mpkernels._shared.saved import saved_storages
from mpkernels._torch_private.modes import DispatchMode
from mpkernels._torch_private.ops import to_copy
from mpkernels._torch_private.tensors import storage_of
from mpkernels.distributed.parts import part_of
from mpkernels.linear import cast_cache
from mpkernels.memory import measure


class Kept(NamedTuple):
    """The bytes that a forward keeps for its backward: casts of parameters and buffers, and everything else."""

    casts: int
    activations: int


def kept_by(model: nn.Module, loss: Any) -> Kept:
    """Return what a call of ``loss(model)`` keeps. Parameters and buffers don't count."""
    cast_cache.clear()  # what an earlier forward has left there would otherwise not be cast again
    storages = {storage_of(part_of(it)) for it in (*model.parameters(), *model.buffers())}
    mode = _Casts(storages)
    with saved_storages() as saved, mode:
        held = loss(model)
    casts = {storage_of(it) for it in mode.casts}
    activations = sum(size for storage, size in saved.items() if storage.cdata not in storages | casts)
    del held
    return Kept(measure.size(mode.casts), activations)


class _Casts(DispatchMode):  # type: ignore[misc]
    """Keeps the copies that ops make of these storages in another dtype."""

    def __init__(self, storages: set[int]) -> None:
        super().__init__()
        self.casts: list[Tensor] = []
        self._storages = storages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is to_copy and storage_of(part_of(args[0])) in self._storages:
            self.casts.append(part_of(out))
        return out
