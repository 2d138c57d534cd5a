"""Checks the arguments of a step, and names what the user got wrong."""

from typing import Any

import torch
from torch import Tensor

from mpkernels._shared.parameters import order_of_memory
from mpkernels.ops import _checks
from mpkernels.ops.grads.overflow import check_report
from mpkernels.ops.step.int8 import QUANTIZED
from mpkernels.ops.step.rule import Rule
from mpkernels.ops.step.schema import Arguments, entry

SCALARS = {
    "grad_scale": torch.float32,
    "found_inf": torch.float32,
    "total_sumsq": torch.float64,
    "skipped_steps": torch.float32,
}


def check(rule: Rule, *arguments: Any) -> None:
    op, call = rule.op, Arguments.of(rule, arguments)
    lists = dict(
        zip(rule.lists, (call.params, call.grads, *call.states, call.masters, call.scales, call.steps), strict=True)
    )
    params, device = call.params, call.params[0].device if call.params else None
    _checks.tensors(op, "params", params, writable=True)
    for name in rule.lists[1:]:
        if name in rule.optional_lists and not lists[name]:
            continue
        if len(lists[name]) != len(params):
            raise ValueError(f"{op}: {name} must be as long as params, {len(params)}, got {len(lists[name])}")
        dtypes = (*_checks.FLOATS, torch.int8, torch.int16)
        _checks.tensors(op, name, lists[name], device=device, dtypes=dtypes, writable=name != "grads")
    _check_groups(rule, call)
    if call.outcome is not None and (call.outcome.dtype != torch.float32 or call.outcome.numel() != 2):
        raise ValueError(f"{op}: outcome must be two fp32, got {call.outcome.dtype}, shape {tuple(call.outcome.shape)}")
    for i in range(len(params)):
        row = {
            name: entry(tensors, i) if name in rule.optional_lists else tensors[i] for name, tensors in lists.items()
        }
        _check_row(rule, i, {name: tensor for name, tensor in row.items() if tensor is not None})
    for name, dtype in SCALARS.items():
        scalar = getattr(call, name)
        if scalar is not None:
            _checks.scalar(op, name, scalar, like=params[0] if params else None, dtype=dtype)
    if call.report is not None and device is not None:
        check_report(op, call.report, len(params), device)


def _check_groups(rule: Rule, call: Arguments) -> None:
    op, groups = rule.op, len(call.group_sizes)
    if sum(call.group_sizes) != len(call.params):
        raise ValueError(
            f"{op}: group_sizes must add up to the {len(call.params)} params, got {list(call.group_sizes)}"
        )
    values = (*call.hyperparameters, call.maximize)
    for name, values_by_group in zip((*rule.hyperparameters, "maximize"), values, strict=True):
        if len(values_by_group) != groups:
            raise ValueError(f"{op}: {name} must hold one for each of {groups} groups, got {len(values_by_group)}")
    if len(call.on_device) not in (0, rule.may_be_tensors * groups):
        raise ValueError(
            f"{op}: on_device must be empty or hold {rule.may_be_tensors} for each group, got {len(call.on_device)}"
        )
    for i, tensor in enumerate(call.on_device):
        if tensor.numel() and (tensor.numel() != 1 or tensor.dtype not in (torch.float32, torch.float64)):
            raise TypeError(f"{op}: on_device[{i}] must be empty or one fp32 or fp64, got {tensor.dtype}")


def _check_row(rule: Rule, i: int, row: dict[str, Tensor]) -> None:
    """Refuse tensors of one parameter that do not go together. row: the existing ones, by their lists' names."""
    op, param, master = rule.op, row["params"], row.get("masters")
    _checks.scalar(op, f"steps[{i}]", row["steps"], like=param)
    states = {name: row[name] for name in rule.state_lists if name in row}
    for name, tensor in row.items():
        if name in ("params", "scales", "steps"):
            continue
        if tensor.shape != param.shape:
            raise ValueError(
                f"{op}: {name}[{i}] must have the parameter's shape {tuple(param.shape)}, got {tuple(tensor.shape)}"
            )
        is_wide = tensor.dtype == torch.float64
        if is_wide != (param.dtype == torch.float64) and name != "masters":
            raise TypeError(
                f"{op}: {name}[{i}] must be fp64 where its parameter is, and only there, got {tensor.dtype}"
            )
        if name == "grads" and tensor.dtype not in _checks.FLOATS:
            raise TypeError(f"{op}: grads[{i}] must be one of fp16, bf16, fp32, fp64, got {tensor.dtype}")
    for name, tensor in states.items():
        first = next(iter(states))
        if tensor.dtype != states[first].dtype or tensor.dtype in (torch.float16, torch.int16):
            raise TypeError(f"{op}: {name}[{i}] must be fp32, bf16 or int8, like {first}[{i}], got {tensor.dtype}")
    _check_scales(op, i, row.get("scales"), {name: it for name, it in states.items() if it.numel() > 0})
    narrow = param.dtype in (torch.bfloat16, torch.float16)
    if master is not None and not (narrow and master.dtype in (torch.int16, torch.float32)):
        raise TypeError(
            f"{op}: masters[{i}] must be int16 or fp32, for a 16-bit parameter, got {master.dtype} for {param.dtype}"
        )


def _check_scales(op: str, i: int, scales: Tensor | None, states: dict[str, Tensor]) -> None:
    """Refuse 8-bit states of one parameter without their scales, scales without such states, and other layouts."""
    if not states:
        if scales is not None:
            raise TypeError(f"{op}: scales[{i}] must be there for int8 states, and only there, got it without a state")
        return
    first, codes = next(iter(states.items()))
    if (scales is not None) != (codes.dtype == torch.int8):
        raise TypeError(f"{op}: scales[{i}] must be there for int8 states, and only there, got {codes.dtype}")
    if scales is None:
        return
    fewest = len(states) * -(-codes.numel() // QUANTIZED)
    if scales.dtype != torch.float32 or scales.numel() < fewest or not scales.is_contiguous():
        raise ValueError(f"{op}: scales[{i}] must be {fewest} adjacent fp32, got {tuple(scales.shape)}")
    strides = codes.stride()
    if not codes.permute(order_of_memory(codes)).is_contiguous():
        raise ValueError(f"{op}: {first}[{i}] must fill its memory, got strides {strides}")
    for name, tensor in states.items():
        if tensor.stride() != strides:
            raise ValueError(f"{op}: {name}[{i}] must have {first}[{i}]'s strides {strides}, got {tensor.stride()}")
