"""SGD with fp32 master weights, under the names and options of torch.optim.SGD."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from mpkernels.ops._checks import suggests_options
from mpkernels.ops.step.rules.sgd import sgd_
from mpkernels.optim.engine import Engine
from mpkernels.optim.optimizer_rule import OptimizerRule


def _hyperparameters(group: Mapping[str, Any]) -> tuple[Any, ...]:
    return group["lr"], group["weight_decay"], group["momentum"], group["dampening"], group["nesterov"]


def _has_momentum(group: Mapping[str, Any]) -> bool:
    return bool(group["momentum"] != 0)


class SGD(Engine, torch.optim.SGD):
    """``torch.optim.SGD`` for mixed precision: fp32 master weights, clipping and overflow checks inside the step.

    ``AdamW`` says what that means, and what master, state_dtype, max_norm, guard, process_group and
    offload are. Without momentum, an fp32 parameter has no state.

    Args:
        params: the parameters, or groups of them, as torch.optim.SGD takes them.
        lr: the learning rate; a tensor is allowed.
        momentum: how much of the momentum buffer each step keeps. At the first step the buffer is the grad.
        dampening: which share of a grad doesn't reach the buffer.
        weight_decay: a share of each weight that is added to its grad; a tensor is allowed.
        nesterov: whether to step by the grad plus momentum times the new buffer.
        maximize: whether to raise the loss instead of lowering it.
        differentiable: whether to run torch's own step, through which autograd can go; needs fp32 parameters.
    """

    _rule = OptimizerRule(sgd_, _hyperparameters, _has_momentum)

    @suggests_options
    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | Tensor = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        master: str = "split",
        state_dtype: torch.dtype | str = torch.float32,
        max_norm: float | None = None,
        guard: bool | None = None,
        process_group: Any = None,
        offload: bool | str = False,
    ) -> None:
        numbers = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay}
        self._take_options(master, state_dtype, max_norm, guard, process_group, offload, **numbers)
        switches: dict[str, Any] = {"maximize": maximize, "foreach": foreach, "fused": fused}
        switches |= {"differentiable": differentiable}
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov, **switches)
