"""Brings the parts of sharded matrices together for work that needs whole ones: each process does it on some."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

from mpkernels._shared.parameters import is_sharded


class Exchange(NamedTuple):
    """Processes that hold parts of matrices of one shape."""

    group: Any
    dim: int  # along which the matrices are parted
    shape: tuple[int, ...]  # of a whole matrix

    def work_on_wholes(self, parts: Tensor, turn: int, work: Callable[[Tensor, slice], None]) -> None:
        """Have each process change its share of the matrices in place, and get its parts of all matrices back. ``work``
        takes whole matrices, and which of all they are. ``turn``: which process is the first to get one more."""
        size, rank, length = (
            distributed.get_world_size(self.group),
            distributed.get_rank(self.group),
            self.shape[self.dim],
        )
        each, rest = divmod(len(parts), size)
        counts = [each + ((i - turn) % size < rest) for i in range(size)]
        first, longest = sum(counts[:rank]), -(-length // size)
        wholes = parts.new_empty(counts[rank], *self.shape)
        lengths = [min(max(length - i * longest, 0), longest) for i in range(size)]  # as DTensor parts it
        pieces = wholes.split(lengths, 1 + self.dim)
        theirs, ours = [count * parts[0].numel() for count in counts], [piece.numel() for piece in pieces]
        flat = parts.new_empty(sum(ours))
        distributed.all_to_all_single(flat, parts.flatten(), ours, theirs, self.group)
        for piece, received in zip(pieces, flat.split(ours), strict=True):
            piece.copy_(received.view(piece.shape))
        work(wholes, slice(first, first + counts[rank]))
        torch.cat([piece.flatten() for piece in pieces], out=flat)
        distributed.all_to_all_single(parts.view(-1), flat, theirs, ours, self.group)


def exchange_of(param: Any) -> Exchange | None:
    """Return the processes that hold the other parts of a matrix; None if it is whole here."""
    if not is_sharded(param) or all(placement.is_replicate() for placement in param.placements):
        return None
    mesh, (placement, *others) = param.device_mesh, param.placements
    if others or not placement.is_shard():
        raise ValueError(
            f"Muon: params must be sharded over one dimension of a mesh, as by FSDP2, got {param.placements}; HSDP and "
            "FSDP2 with tensor parallelism aren't served"
        )
    return Exchange(mesh.get_group(), placement.dim % param.ndim, tuple(param.shape))
