"""AdamW with fp32 master weights, under the names and options of torch.optim.AdamW."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from mpkernels.ops._checks import suggests_options
from mpkernels.ops.step.rules.adamw import adamw_
from mpkernels.optim.engine import Engine
from mpkernels.optim.optimizer_rule import OptimizerRule


def hyperparameters(group: Mapping[str, Any]) -> tuple[Any, ...]:
    return group["lr"], *group["betas"], group["weight_decay"], group["eps"]


def has_largest(group: Mapping[str, Any]) -> bool:
    return bool(group["amsgrad"])


class AdamW(Engine, torch.optim.AdamW):
    """``torch.optim.AdamW`` for mixed precision: fp32 master weights, clipping and overflow checks inside the step.

    The optimizer trains every weight in fp32. For a bf16 or fp16 parameter it keeps that fp32 weight itself. ``step``
    unscales, clips and skips on its own; it reads the grads and never rewrites them. foreach, capturable and fused are
    accepted and have no effect, because every step is fused and can be captured in a CUDA graph.

    Args:
        params: the parameters, or groups of them, as torch.optim.AdamW takes them.
        lr: the learning rate. A CUDA graph keeps a float's value, and reads a tensor's anew at each replay.
        betas: the decay rates of the two moments; tensors are allowed, as for lr.
        eps: a small number that is added to the denominator.
        weight_decay: the decoupled weight decay: a step first multiplies each weight by 1 - lr * weight_decay.
        amsgrad: whether to divide by the largest second moment so far.
        maximize: whether to raise the loss instead of lowering it.
        differentiable: whether to run torch's own step, through which autograd can go; needs fp32 parameters.
        master: how to keep the fp32 weight of a 16-bit parameter. ``"split"`` stores the 16 bits that the parameter
            lacks; ``"fp32"`` stores a full copy. Parameters in fp32 and fp64 need neither. A parameter group may
            set its own value.
        state_dtype: the dtype of both moments: ``torch.float32``, ``torch.bfloat16`` or ``torch.int8``. int8 takes one
            byte per value, plus one fp32 scale per 256 values (csrc/step/int8.h states the error). fp64 and complex
            parameters keep moments in their own dtype. A parameter group may set its own value. A config may give a
            name: ``"bf16"``, ``"bfloat16"``, ``"torch.bfloat16"``.
        max_norm: the largest global norm of the grads. ``step`` clips them to it, as ``clip_grad_norm_`` would.
        guard: whether to skip a step whose grads hold an inf or NaN when no scaler does. None turns the guard on if
            ``max_norm`` or ``process_group`` is given or a parameter has 16 bits. A scaler always does.
        process_group: the processes that each hold one part of the grads, as under FSDP1. They clip by their common
            norm and skip together. Don't pass it under DistributedDataParallel, where every process has all grads.
        offload: whether to keep masters and moments in the host's memory, for parameters on a GPU. True, or "cpu",
            steps there: grads and weights travel, 2 bytes an element each in 16 bits, and the host waits for the grads.
            "stream" brings states to the GPU, bucket by bucket, and back: nobody waits. Results stay the same. Such a
            step can't be captured in a CUDA graph.
    """

    _rule = OptimizerRule(adamw_, hyperparameters, has_largest)

    @suggests_options
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
        state_dtype: torch.dtype | str = torch.float32,
        max_norm: float | None = None,
        guard: bool | None = None,
        process_group: Any = None,
        offload: bool | str = False,
    ) -> None:
        numbers = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        self._take_options(master, state_dtype, max_norm, guard, process_group, offload, **numbers)
        switches: dict[str, Any] = {"maximize": maximize, "foreach": foreach, "capturable": capturable, "fused": fused}
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, differentiable=differentiable, **switches)
