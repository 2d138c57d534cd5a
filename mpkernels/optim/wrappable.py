"""Checks whether Masters can be put around an optimizer."""

import inspect
from typing import Any

from torch.optim import Optimizer

from mpkernels._torch_private.sharded import is_fsdp1s
from mpkernels.optim.engine import Engine


def check(optimizer: Any) -> None:
    """Raise unless Masters can be put around this optimizer."""
    kind: Any = optimizer if isinstance(optimizer, type) else type(optimizer)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if not isinstance(optimizer, Optimizer):
        what = "the class " if isinstance(optimizer, type) else ""
        raise TypeError(f"Masters: optimizer must be a torch.optim.Optimizer, got {what}{name}")
    if isinstance(optimizer, Engine):
        raise ValueError(f"Masters: optimizer must have no masters yet, got {name}, which keeps its own")
    if any(isinstance(it, Optimizer) for it in vars(optimizer).values()):
        raise ValueError(f"Masters: optimizer must not hold another one, got {name}; put Masters around the inner one")
    _, *arguments = inspect.signature(kind.step).parameters.values()
    if any(it.default is it.empty and it.kind not in (it.VAR_POSITIONAL, it.VAR_KEYWORD) for it in arguments):
        raise ValueError(
            f"Masters: optimizer must step without a closure, got {name}, which evaluates the model in its step: that "
            "would see 16-bit weights"
        )
    for group in optimizer.param_groups:
        check_group(group)


def check_group(group: dict[str, Any]) -> None:
    for key in ("differentiable", "gradient_release"):  # torch's, and optimi's for a step in the backward
        if group.get(key):
            raise ValueError(f"Masters: optimizer must have {key}=False, got {group[key]!r}")
    if any(map(is_fsdp1s, group["params"])):
        raise ValueError("Masters: params must not be FullyShardedDataParallel's; shard the model by fully_shard")
