"""Finds the processes that hold the other parts of FSDP1's parameters, which look like plain tensors."""

import gc
from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakSet

from torch import Tensor

from mpkernels._torch_private.sharded import flat_param_handle, is_fsdp1s, originals_of
from mpkernels.distributed.processes import Processes, are_several

# FSDP's objects, one for each flat parameter. A handle knows its parameters, but no parameter knows its handle.
_handles: WeakSet[Any] = WeakSet()


def has_parts(params: Iterable[Tensor]) -> bool:
    return are_several() and any(map(is_fsdp1s, params))


def peers_of(op: str, params: Sequence[Tensor], for_norm: bool = False) -> Processes | None:
    """Return the processes that hold the other parts of the parameters; None if each process holds whole parameters.
    for_norm: refuse a mixture of parts and whole parameters, because the squares of whole ones must not be added up."""
    parts = list(filter(is_fsdp1s, params)) if are_several() else []
    if not parts:
        return None
    group_of = _groups(op, parts)
    groups = {group_of.get(id(param)) for param in params}
    part_groups = groups - {None}
    if len(part_groups) > 1 or (part_groups and None in groups and for_norm):
        raise ValueError(
            f"{op}: params must be parts that FSDP leaves to the processes of one group, got those of "
            f"{len(part_groups)}{', and whole ones' if None in groups else ''}; leave out max_norm and clip by "
            "FullyShardedDataParallel.clip_grad_norm_, and give the process_group in which all is skipped together"
        )
    return Processes(part_groups.pop(), holds_parts=None not in groups) if part_groups else None


def _groups(op: str, parts: Sequence[Tensor]) -> dict[int, Any]:
    """Return the process group of each parameter, by its id: None with NO_SHARD, where each process has it whole."""
    found = _known_groups()
    if any(id(param) not in found for param in parts):
        kind = flat_param_handle()
        _handles.update(it for it in gc.get_referrers(kind) if type(it) is kind)
        found = _known_groups()
    if any(id(param) not in found for param in parts):
        raise ValueError(f"{op}: process_group must be given, FullyShardedDataParallel's own was not found")
    return found


def _known_groups() -> dict[int, Any]:
    found: dict[int, Any] = {}
    for handle in list(_handles):
        flat, group = handle.flat_param, handle.process_group if handle.uses_sharded_strategy else None
        found |= {id(it): group for it in (flat, *originals_of(flat))}
    return found
