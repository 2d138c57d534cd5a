"""Counts what autograd saves for a backward."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

SavedStorages = dict[StorageWeakRef, int]


@contextmanager
def saved_storages() -> Iterator[SavedStorages]:
    """Yield the bytes of each storage that autograd saves inside this context. The keys don't keep storages alive:
    ``key.expired()`` tells which are freed, ``key.cdata`` is the number that ``storage_of`` a tensor returns."""
    saved: SavedStorages = {}

    def note(tensor: Tensor) -> Tensor:
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            saved[StorageWeakRef(storage)] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        yield saved
