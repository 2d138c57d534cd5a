"""AdamW with fp32 master weights, in torch's own clothes."""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from mpkernels import _adamw_state
from mpkernels._adamw_batch import Batch, real
from mpkernels.ops.adamw import adamw_
from mpkernels.ops.grad_stats import grad_stats

__all__ = ["AdamW"]


class AdamW(torch.optim.AdamW):
    """``torch.optim.AdamW``, and what mixed precision needs of it.

    Every parameter's true weight is fp32. Those of bf16 and fp16 parameters are kept by the optimizer; unscaling,
    clipping and skipping happen inside the step, and the grads are read, never rewritten.

    Args:
        params, lr, betas, eps, weight_decay, amsgrad, maximize, foreach, capturable, differentiable, fused: as torch
            has them. foreach, capturable and fused change nothing here: every step is fused and capturable.
            differentiable=True takes torch's own step, for fp32 parameters alone.
        master: how the fp32 weight of a 16-bit parameter is kept: ``"split"``, a 16-bit remainder beside the
            parameter, or ``"fp32"``, a copy. Parameters in fp32 and fp64 need neither.
        state_dtype: of both moments: ``torch.float32`` or ``torch.bfloat16``. fp64 parameters keep fp64 moments.
        max_norm: clips the global norm of the grads inside the step, as ``clip_grad_norm_`` would.
        guard: skips a step whose grads hold an inf or NaN, also without a scaler. None: on where ``max_norm`` is given
            or a parameter has 16 bits.
    """

    _step_supports_amp_scaling = (
        True  # torch's GradScaler hands over its scale and found_inf and leaves the grads alone
    )

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        master: str = "split",
        state_dtype: torch.dtype = torch.float32,
        max_norm: float | None = None,
        guard: bool | None = None,
    ) -> None:
        if master not in ("split", "fp32"):
            raise ValueError(f"AdamW: master must be 'split' or 'fp32', got {master!r}")
        if state_dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"AdamW: state_dtype must be torch.float32 or torch.bfloat16, got {state_dtype}")
        if max_norm is not None and not max_norm > 0:
            raise ValueError(f"AdamW: max_norm must be above 0, got {max_norm}")
        if max_norm is not None and guard is False:
            raise ValueError("AdamW: max_norm needs the guard: a non-finite norm would clip every grad to NaN")
        self.master, self.state_dtype, self.max_norm, self.guard = master, state_dtype, max_norm, guard
        #: fp32, 0-dim, on the device: the norm of the last step's unscaled grads; None where nothing asked for it
        self.grad_norm: Tensor | None = None
        #: fp32, 0-dim, on the device: steps that an inf or NaN has cost so far
        self.skipped_steps: Tensor | None = None
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
        )
        if differentiable and self._has_16_bit_parameters():
            raise ValueError("AdamW: differentiable=True takes fp32 parameters alone, got 16-bit ones")

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if self.defaults["differentiable"]:
            return super().step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._step()
        return loss

    def _step(self) -> None:
        batches: dict[torch.device, Batch] = {}
        for group in self.param_groups:
            for device, params in self._ready(group).items():
                batches.setdefault(device, Batch()).add(group, params, [self.state[param] for param in params])
        if not batches:
            return
        grad_scale: Tensor | None = getattr(self, "grad_scale", None)
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        total_sumsq = None
        if self._is_guarded(found_inf):
            stats = [grad_stats(batch.grads) for batch in batches.values()]
            total_sumsq = _sum([each.total_sumsq for each in stats])
            found_inf = _sum([each.found_inf for each in stats]) if found_inf is None else found_inf
            norm = total_sumsq.sqrt() if grad_scale is None else total_sumsq.sqrt() / grad_scale.to(total_sumsq.device)
            self.grad_norm = norm.float().reshape(())
        else:
            self.grad_norm = None
        if found_inf is not None:
            self._count(found_inf)
        for device, batch in batches.items():
            adamw_(
                *batch.arguments(),
                grad_scale=_on(device, grad_scale),
                found_inf=_on(device, found_inf),
                total_sumsq=None if self.max_norm is None else _on(device, total_sumsq),
                max_norm=self.max_norm or 0.0,
            )

    def _ready(self, group: dict[str, Any]) -> dict[torch.device, list[Tensor]]:
        """The group's parameters that have a grad, by device, each with a state."""
        ready: dict[torch.device, list[Tensor]] = {}
        for param in group["params"]:
            if param.grad is None:
                continue
            if param.grad.is_sparse:
                raise RuntimeError("Adam does not support sparse gradients, please consider SparseAdam instead")
            if not self.state[param]:
                self.state[param] = _adamw_state.create(real(param), self.master, self.state_dtype, group["amsgrad"])
            ready.setdefault(param.device, []).append(param)
        return ready

    def _has_16_bit_parameters(self) -> bool:
        params = chain.from_iterable(group["params"] for group in self.param_groups)
        return any(_adamw_state.needs_master(param) for param in params)

    def _is_guarded(self, found_inf: Tensor | None) -> bool:
        """Whether the grads are looked at before the step. A scaler that has looked already need not be repeated."""
        if self.max_norm is not None or self.guard:
            return True
        return self.guard is None and found_inf is None and self._has_16_bit_parameters()

    def _count(self, found_inf: Tensor) -> None:
        if self.skipped_steps is None:
            self.skipped_steps = torch.zeros((), dtype=torch.float32, device=found_inf.device)
        skipped = (found_inf.reshape(()) != 0).to(self.skipped_steps)
        self.skipped_steps += skipped
        self.step_was_skipped = skipped

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but no state is rounded to its parameter's dtype on the way."""
        seen: dict[str, Any] = {}

        def remember(_: torch.optim.Optimizer, loaded: dict[str, Any]) -> dict[str, Any]:
            seen.update(loaded)
            # torch insists on a step in each state, where Apex and TransformerEngine count once for the group.
            return loaded | {"state": {number: {"step": 0.0} | state for number, state in loaded["state"].items()}}

        last_hook = self.register_load_state_dict_pre_hook(remember)
        try:
            super().load_state_dict(state_dict)
        finally:
            last_hook.remove()
        for group, saved in zip(self.param_groups, seen["param_groups"], strict=True):
            for param, number in zip(group["params"], saved["params"], strict=True):
                if number in seen["state"]:
                    self.state[param] = _adamw_state.adopt(
                        real(param), seen["state"][number], saved, self.master, self.state_dtype
                    )

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {key: self.__dict__[key] for key in _OWN if key in self.__dict__}


_OWN = ("master", "state_dtype", "max_norm", "guard", "grad_norm", "skipped_steps", "step_was_skipped")


def _sum(tensors: Sequence[Tensor]) -> Tensor:
    """Of one from each device, on the first."""
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor.to(total.device)
    return total


def _on(device: torch.device, tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.to(device, non_blocking=True)
