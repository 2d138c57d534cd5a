"""The processes that hold DTensors' parts: which they are, and how much each part counts in a sum."""

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

from torch import distributed

from mpkernels._shared.parameters import is_sharded
from mpkernels._torch_private.sharded import root_mesh
from mpkernels.distributed.processes import Processes


def ranks_of(params: Iterable[Any]) -> tuple[int, ...]:
    """Return the ranks that hold a part of a DTensor among ``params``, or all of it. Plain tensors add no ranks."""
    meshes = {param.device_mesh for param in params if is_sharded(param)}
    key = frozenset(map(id, meshes))
    if key not in _ranks:
        if len(_ranks) >= 64:  # a training has a handful
            _ranks.clear()
        _ranks[key] = meshes, _ranks_in(meshes)
    return _ranks[key][1]


_ranks: dict[frozenset[int], tuple[set[Any], tuple[int, ...]]] = {}  # by the ids of meshes, which the values keep alive


def _ranks_in(meshes: set[Any]) -> tuple[int, ...]:
    """Return the ranks in these meshes, and in the mesh that several slices of one mesh span together."""
    dims: dict[Any, set[str]] = {}  # root mesh -> the dimensions of it that slices use
    ranks: set[int] = set()
    for mesh in meshes:
        ranks.update(mesh.mesh.flatten().tolist())
        names = mesh.mesh_dim_names
        if names is not None:
            dims.setdefault(root_mesh(mesh), set()).update(names)
    for root, used in dims.items():
        # If a mesh has a slice for data and one for tensors, each process must know the processes of all slices.
        names_in_order = [name for name in root.mesh_dim_names or () if name in used]
        if len(names_in_order) == len(used):
            ranks.update(root[tuple(names_in_order)].mesh.flatten().tolist())
    return tuple(sorted(ranks))


def peers_of(params: Sequence[Any], group: Any = None) -> "Parts | None":
    """Return the processes that have the other parts of these parameters; None where no parameter is a DTensor.
    ``group`` may hold further processes."""
    ranks = ranks_of(params)
    return Parts(_group_of(ranks) if group is None else group, len(ranks)) if ranks else None


class Parts(Processes):
    """Processes that hold DTensors' parts. Where several hold the same part, as with HSDP, each has a share."""

    def __init__(self, group: Any, size: int) -> None:
        super().__init__(group)
        self._size = size

    def shares(self, params: Sequence[Any]) -> list[float]:
        """Return how much the square of this process's part of each parameter counts in a sum over all processes.
        Processes that hold the same part count as one."""
        known: dict[Any, float] = {None: 1 / self._size}  # a plain parameter is whole in each process
        kinds: list[Any] = [(param.device_mesh, param.placements) if is_sharded(param) else None for param in params]
        for kind in kinds:
            if kind not in known:
                mesh, placements = kind
                known[kind] = prod(mesh.size(i) for i, p in enumerate(placements) if not p.is_replicate()) / self._size
        return [known[kind] for kind in kinds]


_groups: dict[tuple[Any, tuple[int, ...]], Any] = {}


def _group_of(ranks: tuple[int, ...]) -> Any:
    """Return a group of these ranks. All of them must call this at the same time; no other process needs to."""
    world = distributed.group.WORLD
    if len(ranks) == distributed.get_world_size():
        return world
    if (world, ranks) not in _groups:
        for known in [key for key in _groups if key[0] is not world]:  # groups of a world that has ended
            del _groups[known]
        _groups[world, ranks] = distributed.new_group(list(ranks), use_local_synchronization=True)
    return _groups[world, ranks]
