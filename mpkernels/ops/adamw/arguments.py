"""What adamw_ is given, and what of it a user may have got wrong."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpkernels.ops import _checks
from mpkernels.ops.adamw.int8 import QUANTIZED
from mpkernels.ops.grads.overflow import check_report, order_of_memory


class Arguments(NamedTuple):
    """The schema's. An entry of a list that is optional is an empty tensor where a parameter has none."""

    params: Sequence[Tensor]
    grads: Sequence[Tensor]
    exp_avgs: Sequence[Tensor]
    exp_avg_sqs: Sequence[Tensor]
    max_exp_avg_sqs: Sequence[Tensor]  # optional, as is the whole list
    masters: Sequence[Tensor]  # likewise
    scales: Sequence[Tensor]  # likewise
    steps: Sequence[Tensor]
    group_sizes: Sequence[int]
    lr: Sequence[float]
    beta1: Sequence[float]
    beta2: Sequence[float]
    weight_decay: Sequence[float]
    eps: Sequence[float]
    maximize: Sequence[bool]
    on_device: Sequence[Tensor]
    grad_scale: Tensor | None
    found_inf: Tensor | None
    total_sumsq: Tensor | None
    max_norm: float
    outcome: Tensor | None
    skipped_steps: Tensor | None
    report: Tensor | None

    def group_of_each(self) -> list[int]:
        return [group for group, size in enumerate(self.group_sizes) for _ in range(size)]

    def entry(self, name: str, i: int) -> Tensor | None:
        tensors: Sequence[Tensor] = getattr(self, name)
        return tensors[i] if tensors and tensors[i].numel() else None


LISTS = Arguments._fields[:8]
OPTIONAL = ("max_exp_avg_sqs", "masters", "scales")
SCALARS = {
    "grad_scale": torch.float32,
    "found_inf": torch.float32,
    "total_sumsq": torch.float64,
    "skipped_steps": torch.float32,
}


def check(*arguments: Any) -> None:
    it = Arguments(*arguments)
    lists: dict[str, Sequence[Tensor]] = {name: getattr(it, name) for name in LISTS}
    params, device = it.params, it.params[0].device if it.params else None
    _checks.tensors("adamw_", "params", params, writable=True)
    for name in LISTS[1:]:
        if name in OPTIONAL and not lists[name]:
            continue
        if len(lists[name]) != len(params):
            raise ValueError(f"adamw_: {name} must be as long as params, {len(params)}, got {len(lists[name])}")
        dtypes = (*_checks.FLOATS, torch.int8, torch.int16)
        _checks.tensors("adamw_", name, lists[name], device=device, dtypes=dtypes, writable=name != "grads")
    groups = len(it.group_sizes)
    if sum(it.group_sizes) != len(params):
        raise ValueError(f"adamw_: group_sizes must add up to the {len(params)} params, got {list(it.group_sizes)}")
    for name in ("lr", "beta1", "beta2", "weight_decay", "eps", "maximize"):
        if len(getattr(it, name)) != groups:
            raise ValueError(f"adamw_: {name} must hold one for each of {groups} groups, got {len(getattr(it, name))}")
    if len(it.on_device) not in (0, 3 * groups):
        raise ValueError(f"adamw_: on_device must be empty or hold three for each group, got {len(it.on_device)}")
    for i, tensor in enumerate(it.on_device):
        if tensor.numel() and (tensor.numel() != 1 or tensor.dtype not in (torch.float32, torch.float64)):
            raise TypeError(f"adamw_: on_device[{i}] must be empty or one fp32 or fp64, got {tensor.dtype}")
    if it.outcome is not None and (it.outcome.dtype != torch.float32 or it.outcome.numel() != 2):
        raise ValueError(f"adamw_: outcome must be two fp32, got {it.outcome.dtype}, shape {tuple(it.outcome.shape)}")
    for i, param in enumerate(params):
        _check_row(i, param, **{name: tensors[i] for name, tensors in lists.items() if name != "params" and tensors})
    for name, dtype in SCALARS.items():
        scalar = getattr(it, name)
        if scalar is not None:
            _checks.scalar("adamw_", name, scalar, like=params[0] if params else None, dtype=dtype)
    if it.report is not None and device is not None:
        check_report("adamw_", it.report, len(params), device)


def _check_row(
    i: int,
    param: Tensor,
    grads: Tensor,
    exp_avgs: Tensor,
    exp_avg_sqs: Tensor,
    steps: Tensor,
    max_exp_avg_sqs: Tensor | None = None,
    masters: Tensor | None = None,
    scales: Tensor | None = None,
) -> None:
    """Refuse tensors of one parameter that do not go together."""
    _checks.scalar("adamw_", f"steps[{i}]", steps, like=param)
    states = {"exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs, "max_exp_avg_sqs": max_exp_avg_sqs}
    for name, tensor in {"grads": grads, **states, "masters": masters}.items():
        if tensor is None or (name in OPTIONAL and tensor.numel() == 0):
            continue
        if tensor.shape != param.shape:
            raise ValueError(
                f"adamw_: {name}[{i}] must have the parameter's shape {tuple(param.shape)}, got {tuple(tensor.shape)}"
            )
        is_wide = tensor.dtype == torch.float64
        if is_wide != (param.dtype == torch.float64) and name != "masters":
            raise TypeError(
                f"adamw_: {name}[{i}] must be fp64 where its parameter is, and only there, got {tensor.dtype}"
            )
        if name == "grads" and tensor.dtype not in _checks.FLOATS:
            raise TypeError(f"adamw_: grads[{i}] must be one of fp16, bf16, fp32, fp64, got {tensor.dtype}")
        if name in states and (tensor.dtype != exp_avgs.dtype or tensor.dtype in (torch.float16, torch.int16)):
            raise TypeError(f"adamw_: {name}[{i}] must be fp32, bf16 or int8, like exp_avgs[{i}], got {tensor.dtype}")
    _check_scales(i, param, scales, states)
    if masters is None or masters.numel() == 0:
        return
    if param.dtype not in (torch.bfloat16, torch.float16) or masters.dtype not in (torch.int16, torch.float32):
        raise TypeError(
            f"adamw_: masters[{i}] must be int16 or fp32, for a 16-bit parameter, got {masters.dtype} for {param.dtype}"
        )


def _check_scales(i: int, param: Tensor, scales: Tensor | None, moments: dict[str, Tensor | None]) -> None:
    """Refuse 8-bit moments of one parameter without their scales, scales without such moments, and other layouts."""
    codes = {name: tensor for name, tensor in moments.items() if tensor is not None and tensor.numel() > 0}
    if not codes:
        return
    first = codes["exp_avgs"]
    if (scales is not None and scales.numel() > 0) != (first.dtype == torch.int8):
        raise TypeError(f"adamw_: scales[{i}] must be there for int8 moments, and only there, got {first.dtype}")
    if scales is None or first.dtype != torch.int8:
        return
    fewest = len(codes) * -(-param.numel() // QUANTIZED)
    if scales.dtype != torch.float32 or scales.numel() < fewest or not scales.is_contiguous():
        raise ValueError(f"adamw_: scales[{i}] must be {fewest} adjacent fp32, got {tuple(scales.shape)}")
    strides = first.stride()
    if not first.permute(order_of_memory(first)).is_contiguous():
        raise ValueError(f"adamw_: exp_avgs[{i}] must fill its memory, got strides {strides}")
    for name, tensor in codes.items():
        if tensor.stride() != strides:
            raise ValueError(f"adamw_: {name}[{i}] must have exp_avgs[{i}]'s strides {strides}, got {tensor.stride()}")
