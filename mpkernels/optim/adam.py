"""Adam with fp32 master weights, under the names and options of torch.optim.Adam."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from mpkernels.ops._checks import suggests_options
from mpkernels.ops.step.rules.adam import adam_
from mpkernels.optim import adamw
from mpkernels.optim.engine import Engine
from mpkernels.optim.optimizer_rule import OptimizerRule


def _hyperparameters(group: Mapping[str, Any]) -> tuple[Any, ...]:
    return *adamw.hyperparameters(group), group["decoupled_weight_decay"]


class Adam(Engine, torch.optim.Adam):
    """``torch.optim.Adam`` for mixed precision: fp32 master weights, clipping and overflow checks inside the step.

    ``AdamW`` says what that means, and what master, state_dtype, max_norm, guard, process_group and
    offload are.

    Args:
        params: the parameters, or groups of them, as torch.optim.Adam takes them.
        lr: the learning rate; a tensor is allowed.
        betas: the decay rates of the two moments; tensors are allowed.
        eps: a small number that is added to the denominator.
        weight_decay: a share of each weight that is added to its grad.
        amsgrad: whether to divide by the largest second moment so far.
        maximize: whether to raise the loss instead of lowering it.
        differentiable: whether to run torch's own step, through which autograd can go; needs fp32 parameters.
        decoupled_weight_decay: whether the decay goes to the weight instead, as AdamW's does.
    """

    _rule = OptimizerRule(adam_, _hyperparameters, adamw.has_largest)

    @suggests_options
    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        master: str = "split",
        state_dtype: torch.dtype | str = torch.float32,
        max_norm: float | None = None,
        guard: bool | None = None,
        process_group: Any = None,
        offload: bool | str = False,
    ) -> None:
        numbers = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        self._take_options(master, state_dtype, max_norm, guard, process_group, offload, **numbers)
        switches: dict[str, Any] = {"maximize": maximize, "foreach": foreach, "capturable": capturable, "fused": fused}
        switches |= {"differentiable": differentiable, "decoupled_weight_decay": decoupled_weight_decay}
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **switches)
