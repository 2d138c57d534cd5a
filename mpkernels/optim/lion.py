"""Lion with fp32 master weights, under the names of its authors' optimizer (lion_pytorch.py in google/automl)."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from mpkernels.ops._checks import suggests_options
from mpkernels.ops.step.rules.lion import lion_
from mpkernels.optim.engine import Engine
from mpkernels.optim.optimizer_rule import OptimizerRule


def _hyperparameters(group: Mapping[str, Any]) -> tuple[Any, ...]:
    return group["lr"], *group["betas"], group["weight_decay"]


class Lion(Engine):
    """Lion (Chen et al., 2023) for mixed precision: each weight moves by lr, in the direction of a sign.

    It has fp32 master weights, clipping and overflow checks inside the step. ``AdamW`` says what that means, and what
    master, state_dtype, max_norm, guard, process_group and offload are. The first four arguments are those of Lion's
    authors.

    Args:
        params: the parameters, or groups of them.
        lr: the learning rate, 3 to 10 times smaller than AdamW's; a tensor is allowed.
        betas: how much of the average the direction takes, and how much of it each step keeps; tensors are allowed.
        weight_decay: the decoupled weight decay: a step first multiplies each weight by 1 - lr * weight_decay.
        maximize: whether to raise the loss instead of lowering it.
    """

    _rule = OptimizerRule(lion_, _hyperparameters)

    @suggests_options
    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-4,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        master: str = "split",
        state_dtype: torch.dtype | str = torch.float32,
        max_norm: float | None = None,
        guard: bool | None = None,
        process_group: Any = None,
        offload: bool | str = False,
    ) -> None:
        numbers = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        self._take_options(master, state_dtype, max_norm, guard, process_group, offload, **numbers)
        if not lr >= 0:
            raise ValueError(f"Lion: lr must be 0 or above, got {lr}")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"Lion: betas must be from 0 to below 1, got {tuple(betas)}")
        if not weight_decay >= 0:
            raise ValueError(f"Lion: weight_decay must be 0 or above, got {weight_decay}")
        super().__init__(params, {**numbers, "maximize": maximize})
