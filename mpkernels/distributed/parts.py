"""The part of a parameter that this process holds.

FSDP2 and tensor parallelism make DTensors. Kernels take the part that is here. What belongs to a parameter, its grad
and its states, is placed as the parameter is, so that checkpoints know which part it is.
"""

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mpkernels._shared.parameters import are_any_sharded, is_sharded
from mpkernels._torch_private.sharded import around_part, offsets_of_part, parts_in_place


def part_of(tensor: Any) -> Any:
    """Return what this process holds of a DTensor; anything else as it is."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        part = tensor.to_local()
    return part.wait() if hasattr(part, "wait") else part  # a collective may be on its way


def parts_of(tensors: Sequence[Any]) -> list[Any]:
    """Return ``part_of`` each tensor: the same objects each time, and fast."""
    if not are_any_sharded(tensors):
        return list(tensors)
    in_place = parts_in_place(tensors)
    return [part if type(part) is Tensor else part_of(it) for part, it in zip(in_place, tensors, strict=True)]


def parts_in(state: dict[str, Any]) -> dict[str, Any]:
    """Return a parameter's state with this process's parts of its DTensors."""
    return {key: part_of(value) for key, value in state.items()}


def placed_as(like: Any, part: Tensor) -> Any:
    """Return a DTensor placed as ``like``, with ``part`` as this process's part; ``part`` if ``like`` is no DTensor."""
    if not is_sharded(like):
        return part
    if part.device.type not in (like.device_mesh.device_type, "meta"):
        return around_part(part, like)
    kind = sys.modules["torch.distributed.tensor"].DTensor
    with torch.no_grad():
        return kind.from_local(
            part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )


@torch.no_grad()
def part_for(param: Any, whole: Any) -> Any:
    """Return this process's part of what a checkpoint has of a parameter, which may be whole, or placed otherwise."""
    if is_sharded(whole) and is_sharded(param):
        if whole.device_mesh != param.device_mesh:
            return part_for(param, whole.full_tensor())
        return part_of(whole.redistribute(placements=param.placements))
    if is_sharded(whole):
        return whole.full_tensor()
    if is_sharded(param):
        distribute = sys.modules["torch.distributed.tensor"].distribute_tensor
        there = whole.to(part_of(param).device)
        return part_of(distribute(there, param.device_mesh, param.placements, src_data_rank=None))
    return whole


def reshard(model: torch.nn.Module) -> None:
    """Free the whole weights that FSDP2's outermost module keeps after a forward, for a backward that won't come."""
    loaded = sys.modules.get("torch.distributed.fsdp")
    if loaded is None:  # then FSDP2 wraps nothing
        return
    for module in model.modules():
        if isinstance(module, loaded.FSDPModule):
            module.reshard()


def await_grad(param: Any) -> None:
    """Wait until the grad has reached the host. A hook that reads it there must call this: FSDP2's CPUOffloadPolicy in
    torch 2.10 calls hooks while the current stream still copies."""
    if param.device.type == "cpu" and is_sharded(param) and torch.accelerator.is_available():
        torch.accelerator.current_stream().synchronize()


def settled_grads(params: Sequence[Any]) -> list[Any]:
    """Return the grad of each parameter, placed as the parameter is; None where there is none. Under sequence
    parallelism each process has a summand of a norm layer's grad."""
    grads = [param.grad for param in params]
    if not are_any_sharded(grads):
        return grads
    kind = sys.modules["torch.distributed.tensor"].DTensor
    places = [i for i, grad in enumerate(grads) if isinstance(grad, kind)]
    if [grads[i].placements for i in places] != [params[i].placements for i in places]:
        for i in places:
            if grads[i].placements != params[i].placements:
                with torch.no_grad():
                    params[i].grad = grads[i] = grads[i].redistribute(placements=params[i].placements)
    return grads


def first_index(tensor: Any) -> tuple[int, ...]:
    """Return where, in the whole, the first element of this process's part is."""
    if is_sharded(tensor):
        return offsets_of_part(tensor.shape, tensor.device_mesh, tensor.placements)
    return (0,) * int(tensor.ndim)


def parts_of_columns(x: Any, weight: Any, bias: Any) -> tuple[Any, Any, Any] | None:
    """Return the parts of a linear layer's arguments from which each process computes its own columns of y, as
    ColwiseParallel places them; None if they are placed otherwise. x's grad is then the sum over processes."""
    tensors = [x, weight] if bias is None else [x, weight, bias]
    if not all(map(is_sharded, tensors)) or weight.device_mesh.ndim != 1:
        return None
    kinds = sys.modules["torch.distributed.tensor"]
    rows = kinds.Shard(0)
    wanted = [kinds.Replicate(), rows, rows]
    if any(it.placements != (placement,) for it, placement in zip(tensors, wanted, strict=False)):
        return None
    x_part = x.to_local(grad_placements=[kinds.Partial()])
    return x_part, weight.to_local(), None if bias is None else bias.to_local()


def columns_of(x: Any, weight: Any, part: Tensor) -> Any:
    """Return y, of which this process has computed its columns."""
    kinds = sys.modules["torch.distributed.tensor"]
    shape = torch.Size((*x.shape[:-1], weight.shape[0]))
    stride = torch.empty(shape, device="meta").stride()
    return kinds.DTensor.from_local(
        part, weight.device_mesh, [kinds.Shard(x.ndim - 1)], run_check=False, shape=shape, stride=stride
    )
