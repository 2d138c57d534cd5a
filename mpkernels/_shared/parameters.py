"""Helpers for the tensors that optimizers are given: lists them, groups them by device, knows DTensors."""

import sys
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from itertools import repeat
from operator import is_
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

Item = TypeVar("Item")


def params_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of all groups, in their order."""
    params: list[Tensor] = []
    for group in optimizer.param_groups:
        params += group["params"]
    return params


def named_in(op: str, argument: str, model: Module, names: str | Iterable[str]) -> set[Tensor]:
    """Return the parameters that these names of modules and parameters mean; ``*`` in a name matches anything."""
    named = [*model.named_modules(remove_duplicate=False), *model.named_parameters(remove_duplicate=False)]
    params: set[Tensor] = set()
    for pattern in [names] if isinstance(names, str) else names:
        found = [it for name, it in named if fnmatchcase(name, pattern)]
        if not found:
            raise ValueError(f"{op}: {argument} must name modules or parameters of the model, got {pattern!r}")
        for match in found:
            params.update(match.parameters() if isinstance(match, Module) else [match])
    return params


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer that Accelerate's, Lightning's and Fabric's wrappers hold."""
    inner = getattr(optimizer, "optimizer", None)
    return unwrapped(inner) if isinstance(optimizer, Optimizer) and isinstance(inner, Optimizer) else optimizer


def group_of(optimizer: Optimizer, param: Tensor, group_number: int, place: int) -> dict[str, Any] | None:
    """Return the group that holds the parameter now. Try the given group and place first, because a search through all
    groups is slow."""
    groups = optimizer.param_groups
    for group in groups[group_number : group_number + 1]:
        if any(other is param for other in group["params"][place : place + 1]):
            return group
    return next((group for group in groups if any(map(is_, group["params"], repeat(param)))), None)


def by_device(tensors: Iterable[Tensor], items: Iterable[Item]) -> dict[torch.device, list[Item]]:
    """Group the items by their tensors' devices."""
    found: dict[torch.device, list[Item]] = {}
    for tensor, item in zip(tensors, items, strict=True):
        found.setdefault(tensor.device, []).append(item)
    return found


def is_sharded(tensor: Any) -> bool:
    """Return whether this is a DTensor."""
    loaded = sys.modules.get("torch.distributed.tensor")  # without this module there are no DTensors
    return loaded is not None and isinstance(tensor, loaded.DTensor)


def are_any_sharded(tensors: Iterable[Any]) -> bool:
    """Return whether there is a DTensor among these. Looks only at each tensor's class."""
    loaded = sys.modules.get("torch.distributed.tensor")
    return loaded is not None and any(map(issubclass, set(map(type, tensors)), repeat(loaded.DTensor)))


def put_on(device: torch.device, tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy of it on the device. The host waits only for a copy to the CPU: it might read that
    too early."""
    return tensor.to(device, non_blocking=device.type != "cpu")


def sum_of(tensors: Sequence[Tensor]) -> Tensor:
    """Add up one tensor from each device, on the first tensor's device."""
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + put_on(total.device, tensor)
    return total


def order_of_memory(tensor: Tensor) -> list[int]:
    """Return the tensor's dimensions, the one whose elements are farthest apart first."""
    return sorted(range(tensor.dim()), key=tensor.stride, reverse=True)


def real(tensor: Tensor) -> Tensor:
    """Return a view of the same memory: two numbers for each complex one."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def real_values(tensor: Tensor) -> Tensor:
    """Return a tensor's real numbers to read. Of a conjugated or negated view, they are a copy."""
    return real(tensor.resolve_conj().resolve_neg())


def real_memory(tensor: Tensor) -> Tensor:
    """Return a view of the same memory: real numbers, without the signs that a conjugated or negated view gives them.
    Those don't matter for norms and scaling. Autograd doesn't hear of writes to the memory of a negated view."""
    tensor = tensor.conj() if tensor.is_conj() else tensor
    if tensor.is_neg():
        bare = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        tensor = bare.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
    return real(tensor)


def set_grad_dtype(param: Tensor, dtype: torch.dtype | None) -> None:
    """Give the present grad and later ones this dtype. None allows any dtype for later grads, and gives the present one
    its parameter's."""
    if param.grad_dtype == dtype:
        return
    grad, param.grad = param.grad, None
    param.grad_dtype = dtype
    if grad is not None:
        param.grad = grad.to(dtype or param.dtype)


def refuse_sparse(name: str, grad: Tensor | None) -> None:
    """Raise if the grad is sparse; for AdamW and Adam, torch's error."""
    if grad is not None and grad.is_sparse:
        if name.startswith("Adam"):
            raise RuntimeError("Adam does not support sparse gradients, please consider SparseAdam instead")
        raise RuntimeError(f"{name} does not support sparse gradients")


def refuse_unserved(op: str, argument: str, tensors: Iterable[Tensor]) -> None:
    """Raise for the first tensor whose class computes in its own way, because that knows nothing of our ops."""
    for i, tensor in enumerate(tensors):
        if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
            raise TypeError(
                f"{op}: {argument}[{i}] must be a plain tensor, got a {type(tensor).__name__}, which does not take "
                "our ops; give such parameters to the optimizer that its library names"
            )
