"""What a forward leaves in memory."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from mpkernels._torch_private.modes import DispatchMode
from mpkernels._torch_private.ops import to_copy
from mpkernels._torch_private.tensors import leaves_of, storage_of
from mpkernels.distributed.parts import part_of
from mpkernels.memory import measure


class Forward(DispatchMode):  # type: ignore[misc]
    """What a forward saves for the backward, which 16-bit copies of parameters it makes, and what it leaves in all."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.casts: list[Tensor] = []
        self._known = {storage_of(part_of(it)) for it in (*model.parameters(), *model.buffers())}
        self._saved: list[Tensor] = []
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}  # held weakly: what is freed does not count

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {storage_of(it) for it in _strided((args, kwargs))}
        if func is to_copy and given & self._known:
            self.casts.append(out)
        for it in _strided(out):
            if storage_of(it) not in given:  # else a view, or changed in place
                storage = it.untyped_storage()
                self._made[storage_of(it)] = StorageWeakRef(storage), storage.nbytes()
        return out

    def __enter__(self) -> "Forward":
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._keep, lambda it: it)
        self._hooks.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._hooks.__exit__(*error)

    def _keep(self, tensor: Tensor) -> Tensor:
        self._saved += _strided(tensor)
        return tensor

    def size_of_activations(self) -> int:
        known = self._known | {storage_of(it) for it in self.casts}
        return measure.size(it for it in self._saved if storage_of(it) not in known)

    def size_of_what_is_left(self) -> int:
        """Bytes of all tensors that it has made and that still are there."""
        return sum(size for made, size in self._made.values() if not made.expired())


def _strided(values: Any) -> Iterator[Tensor]:
    """Return the tensors among the values that lie in one piece of memory; of a DTensor, this process's part."""
    tensors = (part_of(it) for it in leaves_of(values) if isinstance(it, Tensor))
    return (it for it in tensors if it.layout == torch.strided)
