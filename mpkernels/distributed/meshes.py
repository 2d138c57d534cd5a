"""The processes that hold DTensors' parts: which they are, and how much of a sum each part is."""

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

from torch import distributed

from mpkernels._torch_private.sharded import root_mesh
from mpkernels.distributed.processes import Processes
from mpkernels.parameters import is_sharded


def ranks_of(params: Iterable[Any]) -> tuple[int, ...]:
    """Return the processes that hold a part of any of these, or the whole. None of a plain tensor is known."""
    meshes = {param.device_mesh for param in params if is_sharded(param)}
    key = frozenset(map(id, meshes))
    if key not in _ranks:
        if len(_ranks) >= 64:  # a training has a handful
            _ranks.clear()
        _ranks[key] = meshes, _ranks_in(meshes)
    return _ranks[key][1]


_ranks: dict[frozenset[int], tuple[set[Any], tuple[int, ...]]] = {}  # of meshes, which live on here, by their ids


def _ranks_in(meshes: set[Any]) -> tuple[int, ...]:
    """As ranks_of, by a look at each rank: of 16,384, 0.4 ms."""
    dims: dict[Any, set[str]] = {}  # of each mesh that others are slices of: the dimensions in use
    ranks: set[int] = set()
    for mesh in meshes:
        ranks.update(mesh.mesh.flatten().tolist())
        names = mesh.mesh_dim_names
        if names is not None:
            dims.setdefault(root_mesh(mesh), set()).update(names)
    for root, used in dims.items():
        # A slice for data and one for tensors: a process of the one must know those of the other's other slices.
        of_root = [name for name in root.mesh_dim_names or () if name in used]
        if len(of_root) == len(used):
            ranks.update(root[tuple(of_root)].mesh.flatten().tolist())
    return tuple(sorted(ranks))


def peers_of(params: Sequence[Any], group: Any = None) -> "Parts | None":
    """Return the processes that have the other parts of these parameters; None where no parameter is a DTensor.
    group: of more processes, among which these are some."""
    ranks = ranks_of(params)
    return Parts(_group_of(ranks) if group is None else group, len(ranks)) if ranks else None


class Parts(Processes):
    """Processes that hold DTensors' parts. Some may hold the same, as with HSDP: squares count by their share."""

    def __init__(self, group: Any, size: int) -> None:
        super().__init__(group)
        self._size = size

    def shares(self, params: Sequence[Any]) -> list[float]:
        """Return how much the square of this process's part of each counts in a sum over all processes: those that
        hold the same part count as one."""
        known: dict[Any, float] = {None: 1 / self._size}  # of a plain parameter, which each process has
        kinds: list[Any] = [(it.device_mesh, it.placements) if is_sharded(it) else None for it in params]
        for it in kinds:
            if it not in known:
                mesh, placements = it
                known[it] = prod(mesh.size(i) for i, p in enumerate(placements) if not p.is_replicate()) / self._size
        return [known[it] for it in kinds]


_groups: dict[tuple[Any, tuple[int, ...]], Any] = {}


def _group_of(ranks: tuple[int, ...]) -> Any:
    """Return a group of these: all of them call this at the same time, and no other needs to."""
    world = distributed.group.WORLD
    if len(ranks) == distributed.get_world_size():
        return world
    if (world, ranks) not in _groups:
        for known in [key for key in _groups if key[0] is not world]:  # of a world that has ended
            del _groups[known]
        _groups[world, ranks] = distributed.new_group(list(ranks), use_local_synchronization=True)
    return _groups[world, ranks]
