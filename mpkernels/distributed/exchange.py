"""Brings the parts of sharded matrices together for work that needs whole ones: each process gets some of the matrices,
and gives everybody's parts back."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

from mpkernels._shared.parameters import is_sharded


class Owned(NamedTuple):
    """How many matrices of a stack each process works on: those of the first process come first."""

    counts: list[int]
    rank: int

    def mine(self, items: Sequence[Any]) -> list[Any]:
        first = sum(self.counts[: self.rank])
        return list(items[first : first + self.counts[self.rank]])


class Exchange(NamedTuple):
    """Processes that hold parts of matrices of one shape."""

    group: Any
    dim: int  # along which the matrices are parted
    shape: tuple[int, ...]  # of a whole matrix

    def owned(self, matrices: int, turn: int) -> Owned:
        """Share matrices out, one to each process by turns. ``turn``: which process is first to get one more."""
        size = distributed.get_world_size(self.group)
        each, rest = divmod(matrices, size)
        counts = [each + ((rank - turn) % size < rest) for rank in range(size)]
        return Owned(counts, distributed.get_rank(self.group))

    def gather(self, parts: Tensor, owned: Owned) -> Tensor:
        """Return this process's matrices, whole."""
        lengths = self._lengths(len(owned.counts))
        shapes = [self._with_length(owned.counts[owned.rank], length) for length in lengths]
        sizes = [shape.numel() for shape in shapes]
        flat = parts.new_empty(sum(sizes))
        distributed.all_to_all_single(flat, parts.flatten(), sizes, _sizes(parts, owned), self.group)
        pieces = [it.view(shape) for it, shape in zip(flat.split(sizes), shapes, strict=True)]
        return torch.cat(pieces, 1 + self.dim)

    def scatter(self, wholes: Tensor, parts: Tensor, owned: Owned) -> None:
        """Fill everybody's parts from the matrices that each has."""
        pieces = wholes.split(self._lengths(len(owned.counts)), 1 + self.dim)
        flat = torch.cat([piece.flatten() for piece in pieces])
        sizes = [piece.numel() for piece in pieces]
        distributed.all_to_all_single(parts.view(-1), flat, _sizes(parts, owned), sizes, self.group)

    def _lengths(self, size: int) -> list[int]:
        """Return how much of the parted dimension each process has: as DTensor parts it."""
        length = self.shape[self.dim]
        each = -(-length // size)
        return [min(max(length - rank * each, 0), each) for rank in range(size)]

    def _with_length(self, matrices: int, length: int) -> torch.Size:
        shape = list(self.shape)
        shape[self.dim] = length
        return torch.Size((matrices, *shape))


def _sizes(parts: Tensor, owned: Owned) -> list[int]:
    return [count * parts[0].numel() for count in owned.counts]


def exchange_of(param: Any) -> Exchange | None:
    """Return the processes that hold the other parts of a matrix; None if it is whole here."""
    if not is_sharded(param):
        return None
    mesh, placements = param.device_mesh, param.placements
    if all(placement.is_replicate() for placement in placements):
        return None
    if mesh.ndim != 1 or not placements[0].is_shard():
        raise ValueError(
            f"Muon: params must be sharded over one dimension of a mesh, as FSDP2 does it, got {tuple(placements)}; "
            "HSDP and FSDP2 with tensor parallelism aren't served"
        )
    return Exchange(mesh.get_group(), placements[0].dim % param.ndim, tuple(param.shape))
