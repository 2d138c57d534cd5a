"""Muon with fp32 master weights, under the names and options of torch.optim.Muon."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from mpkernels._shared.parameters import are_any_sharded, params_of
from mpkernels.ops._checks import suggests_options
from mpkernels.optim import group_options
from mpkernels.optim.engine import Engine
from mpkernels.optim.muon_plan import MOMENTUM, MuonPlan
from mpkernels.optim.newton_schulz import refuse_bad_numbers
from mpkernels.optim.under_scaler import NOTHING, Handed


class Muon(Engine, torch.optim.Muon):
    """``torch.optim.Muon`` for mixed precision: fp32 master weights, clipping and overflow checks inside the step.

    It steps matrices, 2-D parameters, by their momentum made nearly orthogonal. ``split_params`` picks those of a model
    that Muon is for. Matrices of the same shape are computed together. ``AdamW`` says what master, state_dtype,
    max_norm, guard and process_group are.

    Args:
        params: the matrices, or groups of them.
        lr: the learning rate; a tensor is allowed.
        weight_decay: the decoupled weight decay: a step first multiplies each weight by 1 - lr * weight_decay.
        momentum: how much of the momentum buffer each step keeps.
        nesterov: whether to step by the grad's share and the buffer's, instead of by the buffer alone.
        ns_coefficients: the three coefficients of Newton-Schulz's polynomial.
        eps: the least norm that a matrix is divided by.
        ns_steps: how often the polynomial is applied.
        adjust_lr_fn: how the learning rate follows a matrix's shape: ``"original"``, which None means, too, or
            ``"match_rms_adamw"``.
    """

    _rule = MOMENTUM
    _plan = MuonPlan

    @suggests_options
    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        master: str = "split",
        state_dtype: torch.dtype | str = torch.float32,
        max_norm: float | None = None,
        guard: bool | None = None,
        process_group: Any = None,
        offload: bool | str = False,
    ) -> None:
        numbers: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "eps": eps}
        self._take_options(master, state_dtype, max_norm, guard, process_group, offload, **numbers)
        if offload:
            raise ValueError("Muon: offload must be False: Newton-Schulz on the host would take longer than all else")
        numbers |= {"nesterov": nesterov, "ns_coefficients": ns_coefficients, "ns_steps": ns_steps}
        super().__init__(params, **numbers, adjust_lr_fn=adjust_lr_fn)

    def _plans_for(self, params: list[Tensor], grads: list[Any]) -> tuple[Any, list[Any]]:
        for group in self.param_groups:
            group_options.check_numbers_of(self, group)  # the momentum must not move if the weights then can't
            stepped = [param for param in group["params"] if param.grad is not None]
            if any(map(torch.is_complex, stepped)):
                raise RuntimeError("Muon does not support complex parameters")
            if any(param.ndim != 2 for param in stepped):
                raise ValueError("Param gradient must be a 2D matrix")
            refuse_bad_numbers([group] if stepped else [])
        return super()._plans_for(params, grads)

    def _state_of(self, param: Tensor, grad: Tensor | None, group: dict[str, Any]) -> dict[str, Tensor]:
        state = super()._state_of(param, grad, group)
        state["step"].clamp_(min=1)  # SGD's first step would set the momentum to the grad
        return state

    def is_guarded(self, has_16_bit_parameters: bool, handed: Handed = NOTHING) -> bool:
        """Return whether a step checks its grads. It does where processes exchange matrices, so that none is left
        waiting for one that has failed."""
        is_sharded = are_any_sharded(params_of(self))
        if is_sharded and self.guard is False:
            raise ValueError("Muon: guard must be None or True with sharded params, got False")
        return is_sharded or super().is_guarded(has_16_bit_parameters, handed)
