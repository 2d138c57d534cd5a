"""adamw_: one optimizer step over any list of parameters, with everything that mixed precision adds to it."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpkernels.ops._registry import NativeCall, define
from mpkernels.ops.adamw import int8
from mpkernels.ops.adamw.arguments import Arguments, check
from mpkernels.ops.adamw.split import copied_master, join, split
from mpkernels.ops.grads.overflow import lines

SCHEMA = (
    "adamw_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
    "Tensor(d!)[] max_exp_avg_sqs, Tensor(e!)[] masters, Tensor(f!)[] scales, Tensor(g!)[] steps, int[] group_sizes, "
    "float[] lr, float[] beta1, float[] beta2, float[] weight_decay, float[] eps, bool[] maximize, Tensor[] on_device, "
    "Tensor? grad_scale, Tensor? found_inf, Tensor? total_sumsq, float max_norm, Tensor(h!)? outcome, "
    "Tensor(i!)? skipped_steps, Tensor(j!)? report) -> ()"
)


@define(SCHEMA, check=check)
def _adamw(*arguments: Any) -> None:
    it = Arguments(*arguments)
    if not it.params:
        return
    is_skipped = write_outcome(it.grad_scale, it.found_inf, it.total_sumsq, it.outcome, it.skipped_steps)
    if it.report is not None and is_skipped is not None:
        # Codes stay in the order that they have: a kernel takes all else in it, too.
        order = [
            codes if codes.dtype == torch.int8 else param for codes, param in zip(it.exp_avgs, it.params, strict=True)
        ]
        facts = lines(it.grads, order, it.grad_scale, unscaled=False)
        it.report.copy_(torch.where(is_skipped, facts, it.report))
    for i, group in enumerate(it.group_of_each()):
        if it.params[i].numel() > 0:
            moments = [it.exp_avgs[i], it.exp_avg_sqs[i]]
            if (largest := it.entry("max_exp_avg_sqs", i)) is not None:
                moments.append(largest)
            scales = it.entry("scales", i)
            if scales is not None:
                scales = scales.view(-1, -(-moments[0].numel() // int8.QUANTIZED))
            weight, after = _formula(_weight(it, i), it.grads[i], _decoded(moments, scales), _numbers(it, i, group))
            for old, new in _new_weight(it, i, weight) + _encoded(moments, after, scales):
                _put(old, new, is_skipped)
        _put(it.steps[i], it.steps[i] + 1, is_skipped)


class Numbers(NamedTuple):
    """What is the same for all elements of a parameter, in fp64: rounded once to the computing dtype."""

    grad_factor: Tensor
    decay: Tensor
    weight1: Tensor
    beta2: Tensor
    weight2: Tensor
    step_size: Tensor
    eps: Tensor


def _formula(weight: Tensor, grad: Tensor, moments: list[Tensor], numbers: Numbers) -> tuple[Tensor, list[Tensor]]:
    """torch.optim.AdamW's order (foreach=False), but that the root's bias correction is in step_size and eps."""
    rounded = Numbers(*(number.to(weight.dtype) for number in numbers))
    exp_avg, exp_avg_sq, *largest = moments
    grad = grad.to(weight.dtype) * rounded.grad_factor
    weight = weight * rounded.decay
    exp_avg = exp_avg + (grad - exp_avg) * rounded.weight1
    exp_avg_sq = exp_avg_sq * rounded.beta2 + grad * rounded.weight2 * grad
    largest = [torch.maximum(before, exp_avg_sq) for before in largest]
    root = [exp_avg_sq, *largest][-1].double().sqrt().to(weight.dtype)  # torch's fp32 root is an ulp off at times
    weight = weight - rounded.step_size * exp_avg / (root + rounded.eps)
    return weight, [exp_avg, exp_avg_sq, *largest]


def _numbers(it: Arguments, i: int, group: int) -> Numbers:
    step = it.steps[i].reshape(()).double() + 1
    lr, beta1, beta2 = (torch.full_like(step, x[group]) for x in (it.lr, it.beta1, it.beta2))
    if it.on_device:
        lr, beta1, beta2 = (
            tensor.reshape(()).double() if tensor.numel() else by_value
            for tensor, by_value in zip(it.on_device[3 * group :], (lr, beta1, beta2), strict=False)
        )
    factor = _unscale_factor(step, it.grad_scale)
    if it.total_sumsq is not None and it.max_norm < math.inf:
        factor = factor * (it.max_norm / (_unscaled_norm(it.grad_scale, it.total_sumsq) + 1e-6)).clamp(max=1)
    correction2 = (1 - beta2**step).sqrt()
    return Numbers(
        grad_factor=-factor if it.maximize[group] else factor,
        decay=1 - lr * it.weight_decay[group],
        weight1=1 - beta1,
        beta2=beta2,
        weight2=1 - beta2,
        step_size=lr / (1 - beta1**step) * correction2,
        eps=it.eps[group] * correction2,
    )


def _unscale_factor(like: Tensor, grad_scale: Tensor | None) -> Tensor:
    if grad_scale is None:
        return torch.ones_like(like.reshape(()), dtype=torch.float64)
    return (1 / grad_scale.reshape(()).double()).float().double()


def _unscaled_norm(grad_scale: Tensor | None, total_sumsq: Tensor) -> Tensor:
    return total_sumsq.reshape(()).sqrt() * _unscale_factor(total_sumsq, grad_scale)


def _is_skipped(grad_scale: Tensor | None, found_inf: Tensor | None, total_sumsq: Tensor | None) -> Tensor | None:
    """Finite grads overflow, too, where a scale below 1 is taken off them: their norm is then beyond fp32."""
    is_skipped = None if found_inf is None else found_inf.reshape(()) != 0
    if grad_scale is not None and total_sumsq is not None:
        is_beyond = _unscaled_norm(grad_scale, total_sumsq) > torch.finfo(torch.float32).max
        is_skipped = is_beyond if is_skipped is None else is_skipped | is_beyond
    return is_skipped


def write_outcome(
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    total_sumsq: Tensor | None,
    outcome: Tensor | None,
    skipped_steps: Tensor | None,
) -> Tensor | None:
    """Return whether the step is skipped. Write that and the norm of the unscaled grads to ``outcome``, and count it
    in ``skipped_steps``."""
    is_skipped = _is_skipped(grad_scale, found_inf, total_sumsq)
    if outcome is not None and total_sumsq is not None:
        outcome[0] = _unscaled_norm(grad_scale, total_sumsq)
    if outcome is not None:
        outcome[1] = 0.0 if is_skipped is None else is_skipped.float()
    if skipped_steps is not None and is_skipped is not None:
        skipped_steps.add_(is_skipped.float())
    return is_skipped


def _weight(it: Arguments, i: int) -> Tensor:
    """Return the true weight, in the computing dtype."""
    param, master = it.params[i], it.entry("masters", i)
    if master is None:
        return param.to(torch.promote_types(param.dtype, torch.float32))
    return (copied_master if master.dtype == torch.float32 else join)(param, master)


def _new_weight(it: Arguments, i: int, weight: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return pairs: what is to be replaced, and by what."""
    param, master = it.params[i], it.entry("masters", i)
    if master is None:
        return [(param, weight)]
    if master.dtype == torch.float32:
        return [(param, weight), (master, weight)]
    return list(zip((param, master), split(weight, param.dtype), strict=True))


def _decoded(moments: list[Tensor], scales: Tensor | None) -> list[Tensor]:
    if scales is None:
        return [moment.to(torch.promote_types(moment.dtype, torch.float32)) for moment in moments]
    return [int8.decode(moment, scales[k], squared=k > 0) for k, moment in enumerate(moments)]


def _encoded(moments: list[Tensor], values: list[Tensor], scales: Tensor | None) -> list[tuple[Tensor, Tensor]]:
    """Return pairs: what is to be replaced, and by what. Codes share a scale with neighbours in memory."""
    if scales is None:
        return list(zip(moments, values, strict=True))
    pairs = []
    for k, (moment, value) in enumerate(zip(moments, values, strict=True)):
        codes, scale = int8.encode(torch.empty_like(moment, dtype=value.dtype).copy_(value), squared=k > 0)
        pairs += [(moment, codes), (scales[k], scale)]
    return pairs


def _put(old: Tensor, new: Tensor, is_skipped: Tensor | None) -> None:
    """Nothing moves on an overflow."""
    new = new.to(old.dtype)
    old.copy_(new if is_skipped is None else torch.where(is_skipped, old, new))


# The same over states that C++ holds on to, known by a number: handing over all lists takes longer than stepping what
# is in them, where they are small. The grads are looked at first if the step is guarded.
plan = NativeCall(
    _adamw,
    "adamw_plan(Tensor[] exp_avgs, Tensor[] exp_avg_sqs, Tensor[] max_exp_avg_sqs, Tensor[] masters, Tensor[] scales, "
    "Tensor[] steps, int[] group_sizes) -> int",
)
by_plan = NativeCall(
    _adamw,
    "adamw_by_plan_(int plan, Tensor(a!)[] params, Tensor[] grads, float[] lr, float[] beta1, float[] beta2, "
    "float[] weight_decay, float[] eps, bool[] maximize, Tensor[] on_device, Tensor? grad_scale, Tensor? found_inf, "
    "Tensor? total_sumsq, float max_norm, Tensor(b!)? outcome, Tensor(c!)? skipped_steps, Tensor(d!)? report, "
    "bool guarded) -> ()",
)
forget = NativeCall(_adamw, "adamw_forget(int plan) -> ()")


def adamw_(
    *rows_and_groups: object,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    total_sumsq: Tensor | None = None,
    max_norm: float = math.inf,
    outcome: Tensor | None = None,
    skipped_steps: Tensor | None = None,
    report: Tensor | None = None,
) -> None:
    """One AdamW step over lists of parameters, in torch's order of operations; ``mpkernels.optim.AdamW`` fills them in.

    Args:
        rows_and_groups: the schema's arguments from params to on_device. Lists go parameter by parameter, in groups of
            group_sizes; an entry of max_exp_avg_sqs, masters or scales is empty where a parameter has none, and the
            whole list where no parameter has one. A master is fp32, or an int16 remainder (split.py); moments are fp32,
            bf16, or int8 with scales (int8.py), those of exp_avg first.
            on_device is empty, or holds lr, beta1 and beta2 of each group: one fp32 or fp64 where it is a tensor, else
            an empty tensor.
        grad_scale: one fp32; grads are divided by it.
        found_inf: one fp32; nothing moves, no step is counted, unless it is 0.
        total_sumsq: one fp64, of the grads as they are; with it the grads are clipped to max_norm, and nothing moves if
            their norm without grad_scale is beyond fp32.
        outcome: two fp32; the first becomes the norm of the unscaled grads if total_sumsq is given, the second 1 if the
            step is skipped, else 0.
        skipped_steps: one fp32, counted up if the step is skipped.
        report: as ``overflow_`` has it, filled if the step is skipped; the order of memory is that of the parameter.
    """
    _adamw(*rows_and_groups, grad_scale, found_inf, total_sumsq, max_norm, outcome, skipped_steps, report)
