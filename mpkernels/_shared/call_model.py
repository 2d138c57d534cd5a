"""Calls a model with a batch of any kind, and refuses what is no model, loss or optimizer, or can't run."""

from collections.abc import Mapping
from typing import Any

from torch.nn import Module


def call(model: Module, batch: Any) -> Any:
    """Return ``model(*batch)`` for a tuple or list, ``model(**batch)`` for a mapping, else ``model(batch)``."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def refuse_no_optimizer(op: str, optimizer: object) -> None:
    if not (hasattr(optimizer, "step") and hasattr(optimizer, "param_groups")):
        raise TypeError(f"{op}: optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")


def refuse_no_model(op: str, model: object) -> None:
    if not isinstance(model, Module):
        raise TypeError(f"{op}: model must be a torch.nn.Module, got {type(model).__name__}")


def refuse_no_loss(op: str, loss: object) -> None:
    if not callable(loss):
        example = "lambda model: criterion(model(inputs), targets)"
        raise TypeError(f"{op}: loss must be a function of the model, as in {example}, got {type(loss).__name__}")


def refuse_meta(op: str, model: Module, remedy: str = "to_empty gives it some") -> None:
    """Raise if a model can't run because one of its tensors has no memory."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise ValueError(f"{op}: model must have memory, got {name} on the meta device; {remedy}")
