"""Reads parameters of which this process holds a part: FSDP's, and DTensors."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torch import Tensor

from mpkernels._torch_private.finding import NoClass, look_up


def flat_param_handle() -> type:
    """Return FSDP1's class that manages a flat parameter. Without it: FSDP's process group must be given."""
    found: type = look_up("torch.distributed.fsdp._flat_param", "FlatParamHandle", NoClass)
    return found


def is_fsdp1s(param: Tensor) -> bool:
    """Return whether this is a flat parameter of FSDP1's. Without the mark: False, and the group must be given."""
    return bool(getattr(param, "_fsdp_flattened", False))


def replaces_exchange(wrapper: Any) -> bool:
    """Return whether a hook of the user's exchanges this DistributedDataParallel's grads. Without the list: False, and
    ``accumulate(grad_dtype=)`` exchanges the grads without calling such a hook."""
    return bool(getattr(wrapper, "_comm_hooks", None))


def parts_in_place(tensors: Iterable[Any]) -> list[Any]:
    """Return the tensor that each DTensor holds; None for other tensors. Without the attribute: None; then ``to_local``
    makes a new view of each parameter at each call, and AdamW plans each step anew."""
    return [getattr(tensor, "_local_tensor", None) for tensor in tensors]


def around_part(part: Tensor, like: Any) -> Any:
    """Return a DTensor with this part, placed like ``like``. The part isn't moved, whereas ``from_local`` would bring
    one on the host to a mesh of GPUs. Without the spec: it raises."""
    spec = like._spec
    meta = spec.tensor_meta._replace(dtype=part.dtype)
    return type(like)(part, replace(spec, tensor_meta=meta), requires_grad=False)


def originals_of(flat: Any) -> list[Tensor]:
    """Return the original parameters that are views of FSDP1's flat parameter. Without the lists: none, and the group
    must be given."""
    return [*(getattr(flat, "_params", None) or ()), *(getattr(flat, "_shared_params", None) or ())]


def root_mesh(mesh: Any) -> Any:
    """Return the mesh that this one is a slice of. Without the method: the slice itself, so that parameters on several
    slices need a process_group."""
    find = getattr(mesh, "_get_root_mesh", None)
    return mesh if find is None else find()


def offsets_of_part(shape: Any, mesh: Any, placements: Any) -> tuple[int, ...]:
    """Return where this process's part of a DTensor begins. Without the function: 0, so that a report's indices count
    within the part."""
    find = look_up("torch.distributed.tensor._utils", "compute_local_shape_and_global_offset", None)
    return (0,) * len(shape) if find is None else tuple(find(shape, mesh, placements)[1])
