"""adamw_: one optimizer step over any list of parameters, with everything that mixed precision adds to it."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mpkernels.ops import _checks, int8
from mpkernels.ops._registry import NativeCall, define
from mpkernels.ops.split import join, split

SCHEMA = (
    "adamw_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
    "Tensor(d!)[] max_exp_avg_sqs, Tensor(e!)[] masters, Tensor(f!)[] scales, Tensor(g!)[] steps, int[] group_sizes, "
    "float[] lr, float[] beta1, float[] beta2, float[] weight_decay, float[] eps, bool[] maximize, Tensor[] on_device, "
    "Tensor? grad_scale, Tensor? found_inf, Tensor? total_sumsq, float max_norm, Tensor(h!)? told, "
    "Tensor(i!)? skipped_steps) -> ()"
)


LISTS = ("params", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "masters", "scales", "steps")
OPTIONAL = ("max_exp_avg_sqs", "masters", "scales")  # may be empty, as may their entries


def _check(*arguments: Any) -> None:
    lists: dict[str, Sequence[Tensor]] = dict(zip(LISTS, arguments, strict=False))
    params, device = lists["params"], lists["params"][0].device if lists["params"] else None
    _checks.tensors("adamw_", "params", params, writable=True)
    for name in LISTS[1:]:
        if name in OPTIONAL and not lists[name]:
            continue
        if len(lists[name]) != len(params):
            raise ValueError(f"adamw_: {name} must be as long as params, {len(params)}, got {len(lists[name])}")
        dtypes = (*_checks.FLOATS, torch.int8, torch.int16)
        _checks.tensors("adamw_", name, lists[name], device=device, dtypes=dtypes, writable=name != "grads")
    for i, param in enumerate(params):
        _check_row(i, param, **{name: tensors[i] for name, tensors in lists.items() if name != "params" and tensors})
    for name, scalar, dtype in zip(
        ("grad_scale", "found_inf", "total_sumsq", "skipped_steps"),
        (*arguments[16:19], arguments[21]),
        (torch.float32, torch.float32, torch.float64, torch.float32),
        strict=True,
    ):
        if scalar is not None:
            _checks.scalar("adamw_", name, scalar, like=params[0] if params else None, dtype=dtype)


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
    """What the tensors of one parameter must be to each other."""
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
    has_scales = scales is not None and scales.numel() > 0
    if param.numel() > 0 and has_scales != (exp_avgs.dtype == torch.int8):
        raise TypeError(f"adamw_: scales[{i}] must be there for int8 moments, and only there, got {exp_avgs.dtype}")
    if has_scales and scales is not None:
        _check_scales(i, scales, [it for it in states.values() if it is not None and it.numel() > 0])
    if masters is None or masters.numel() == 0:
        return
    if param.dtype not in (torch.bfloat16, torch.float16) or masters.dtype not in (torch.int16, torch.float32):
        raise TypeError(
            f"adamw_: masters[{i}] must be int16 or fp32, for a 16-bit parameter, got {masters.dtype} for {param.dtype}"
        )


def _check_scales(i: int, scales: Tensor, moments: Sequence[Tensor]) -> None:
    count = len(moments) * -(-moments[0].numel() // int8.QUANTIZED)
    if scales.dtype != torch.float32 or scales.numel() != count or not scales.is_contiguous():
        raise ValueError(
            f"adamw_: scales[{i}] must be {count} contiguous fp32, for {len(moments)} moments, got {scales.numel()} "
            f"of {scales.dtype}"
        )
    for moment in moments:
        if moment.stride() != moments[0].stride():
            raise ValueError(
                f"adamw_: int8 moments at {i} must have the strides of exp_avgs[{i}], {moments[0].stride()}, "
                f"got {moment.stride()}"
            )


@define(SCHEMA, check=_check)
def _adamw(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    max_exp_avg_sqs: Sequence[Tensor],
    masters: Sequence[Tensor],
    scales: Sequence[Tensor],
    steps: Sequence[Tensor],
    group_sizes: Sequence[int],
    lr: Sequence[float],
    beta1: Sequence[float],
    beta2: Sequence[float],
    weight_decay: Sequence[float],
    eps: Sequence[float],
    maximize: Sequence[bool],
    on_device: Sequence[Tensor],
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    total_sumsq: Tensor | None,
    max_norm: float,
    told: Tensor | None,
    skipped_steps: Tensor | None,
) -> None:
    _tell(grad_scale, found_inf, total_sumsq, told, skipped_steps)
    group_of = [group for group, size in enumerate(group_sizes) for _ in range(size)]
    for i, (param, group) in enumerate(zip(params, group_of, strict=True)):
        if param.numel() > 0:
            compute = torch.float64 if param.dtype == torch.float64 else torch.float32
            step = steps[i].reshape(()).double() + 1
            by_value = [torch.full_like(step, x[group]) for x in (lr, beta1, beta2)]
            tensors = bool(on_device) and on_device[group].numel() > 0
            rate, decay1, decay2 = on_device[group].unbind() if tensors else by_value
            factor = _grad_factor(step, grad_scale, total_sumsq, max_norm) * (-1 if maximize[group] else 1)

            master = masters[i] if masters and masters[i].numel() else None
            if master is None:
                weight = param.to(compute)
            else:
                weight = master if master.dtype == torch.float32 else join(param, master)
            grad = grads[i].to(compute) * factor.to(compute)
            weight = weight * (1 - rate * weight_decay[group]).to(compute)
            moments = [exp_avgs[i], exp_avg_sqs[i]]
            if max_exp_avg_sqs and max_exp_avg_sqs[i].numel():
                moments.append(max_exp_avg_sqs[i])
            in_8_bits = scales[i].view(len(moments), -1) if moments[0].dtype == torch.int8 else None
            exp_avg, exp_avg_sq, *before = (
                moment.to(compute) if in_8_bits is None else int8.decode(moment, in_8_bits[k], squared=k > 0)
                for k, moment in enumerate(moments)
            )
            exp_avg = exp_avg + (grad - exp_avg) * (1 - decay1).to(compute)
            exp_avg_sq = exp_avg_sq * decay2.to(compute) + grad * (1 - decay2).to(compute) * grad
            largest = exp_avg_sq
            if before:
                largest = torch.maximum(before[0], exp_avg_sq)
            root = largest.double().sqrt().to(compute)  # torch's fp32 root is an ulp off at times on a CPU
            correction2 = (1 - decay2**step).sqrt()  # of the root, taken to the other side: one division less
            step_size = (rate / (1 - decay1**step) * correction2).to(compute)
            weight = weight - step_size * exp_avg / (root + (eps[group] * correction2).to(compute))

            if master is None:
                new = [(param, weight)]
            elif master.dtype == torch.float32:
                new = [(param, weight), (master, weight)]
            else:
                new = list(zip((param, master), split(weight, param.dtype), strict=True))
            for k, (moment, value) in enumerate(zip(moments, (exp_avg, exp_avg_sq, largest), strict=False)):
                if in_8_bits is None:
                    new.append((moment, value))
                else:
                    codes, scale = int8.encode(_laid_out_like(moment, value), squared=k > 0)
                    new += [(moment, codes), (in_8_bits[k], scale)]
            for old, value in new:
                _put(old, value, found_inf)
        _put(steps[i], steps[i] + 1, found_inf)


def _tell(
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    total_sumsq: Tensor | None,
    told: Tensor | None,
    skipped_steps: Tensor | None,
) -> None:
    """The norm of the unscaled grads, and whether the step is skipped."""
    is_skipped = None if found_inf is None else (found_inf.reshape(()) != 0).float()
    if told is not None and total_sumsq is not None:
        told[0] = total_sumsq.reshape(()).sqrt() * _unscale_factor(total_sumsq, grad_scale)
    if told is not None:
        told[1] = 0.0 if is_skipped is None else is_skipped
    if skipped_steps is not None and is_skipped is not None:
        skipped_steps += is_skipped


def _unscale_factor(like: Tensor, grad_scale: Tensor | None) -> Tensor:
    if grad_scale is None:
        return torch.ones_like(like.reshape(()), dtype=torch.float64)
    return (1 / grad_scale.reshape(()).double()).float().double()


def _laid_out_like(like: Tensor, values: Tensor) -> Tensor:
    """Codes share a scale with their neighbours in memory."""
    return torch.empty_like(like, dtype=values.dtype).copy_(values)


def _grad_factor(like: Tensor, grad_scale: Tensor | None, total_sumsq: Tensor | None, max_norm: float) -> Tensor:
    """What a grad is multiplied with: 1 / scale, and the clip coefficient."""
    factor = _unscale_factor(like, grad_scale)
    if total_sumsq is not None and max_norm < math.inf:
        norm = total_sumsq.reshape(()).sqrt() * factor
        factor = factor * (max_norm / (norm + 1e-6)).clamp(max=1)
    return factor


def _put(old: Tensor, new: Tensor, found_inf: Tensor | None) -> None:
    """Nothing moves on an overflow."""
    new = new.to(old.dtype)
    old.copy_(new if found_inf is None else torch.where(found_inf.reshape(()) != 0, old, new))


# The same over states that C++ holds on to: handing over all lists takes longer than stepping what is in them (measured
# for 1000 small tensors: 2.5 of 2.9 ms). The grads are looked at first if the step is guarded.
plan = NativeCall(
    _adamw,
    "adamw_plan(Tensor(a!) handle, Tensor[] exp_avgs, Tensor[] exp_avg_sqs, Tensor[] max_exp_avg_sqs, "
    "Tensor[] masters, Tensor[] scales, Tensor[] steps, int[] group_sizes) -> ()",
)
planned = NativeCall(
    _adamw,
    "adamw_planned_(Tensor handle, Tensor(a!)[] params, Tensor[] grads, float[] lr, float[] beta1, float[] beta2, "
    "float[] weight_decay, float[] eps, bool[] maximize, Tensor[] on_device, Tensor? grad_scale, Tensor? found_inf, "
    "Tensor? total_sumsq, float max_norm, Tensor(b!)? told, Tensor(c!)? skipped_steps, bool guarded) -> ()",
)
forget = NativeCall(_adamw, "adamw_forget(Tensor(a!) handle) -> ()")


def adamw_(
    *rows_and_groups: object,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    total_sumsq: Tensor | None = None,
    max_norm: float = math.inf,
    told: Tensor | None = None,
    skipped_steps: Tensor | None = None,
) -> None:
    """One AdamW step over lists of parameters, in torch's order of operations; ``mpkernels.optim.AdamW`` fills them in.

    Args:
        rows_and_groups: the schema's arguments from params to on_device. Lists go parameter by parameter, in groups of
            group_sizes; an entry of max_exp_avg_sqs, masters or scales is empty where a parameter has none, and the
            whole list where no parameter has one. A master is fp32, or an int16 remainder (ops/split.py); moments are
            fp32, bf16, or int8 with scales (ops/int8.py), those of exp_avg first. An entry of
            on_device holds lr, beta1 and beta2 in fp64 where they are tensors, and is empty where the floats count.
        grad_scale: one fp32; grads are divided by it.
        found_inf: one fp32; nothing moves, no step is counted, unless it is 0.
        total_sumsq: one fp64, of the grads as they are; with it the grads are clipped to max_norm.
        told: two fp32; the first becomes the norm of the unscaled grads if total_sumsq is given, the second 1 if the
            step is skipped, else 0.
        skipped_steps: one fp32, counted up if the step is skipped.
    """
    _adamw(*rows_and_groups, grad_scale, found_inf, total_sumsq, max_norm, told, skipped_steps)
