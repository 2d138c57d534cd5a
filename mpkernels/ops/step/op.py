"""The ops of a rule: one step over any list of parameters, with everything that mixed precision adds to it."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mpkernels.ops._registry import NativeCall, define
from mpkernels.ops.grads.overflow import lines
from mpkernels.ops.step import int8
from mpkernels.ops.step.check import check
from mpkernels.ops.step.rule import Rule
from mpkernels.ops.step.schema import Arguments, entry, schemas
from mpkernels.ops.step.skip_and_clip import grad_factor, write_outcome
from mpkernels.ops.step.split import copied_master, join, split


class StepOps:
    """A rule's ops. ``step`` takes all lists. Because that takes longer than stepping small tensors, the other ops let
    C++ keep the states under a number: ``plan`` returns the number, ``by_plan`` steps, after a check of the grads if it
    is ``guarded``, and ``forget`` lets the states go."""

    def __init__(self, rule: Rule) -> None:
        schema, plan, by_plan, forget = schemas(rule)

        def reference(*arguments: Any) -> None:
            _step(rule, *arguments)

        reference.__module__ = rule.step.__module__  # the Triton kernel's module lies beside it
        self.rule = rule
        self.step = define(schema, check=partial(check, rule))(reference)
        self.plan, self.by_plan, self.forget = (NativeCall(self.step, it) for it in (plan, by_plan, forget))

    def __call__(
        self,
        *rows_and_groups: object,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
        total_sumsq: Tensor | None = None,
        max_norm: float = math.inf,
        outcome: Tensor | None = None,
        skipped_steps: Tensor | None = None,
        report: Tensor | None = None,
    ) -> None:
        """Take one step over lists of parameters. ``mpkernels.optim`` fills the lists in.

        Args:
            rows_and_groups: the schema's arguments from params to on_device. Lists go parameter by parameter, in groups
                of group_sizes. An entry of masters, scales or a list of states that the rule can do without is empty
                where a parameter has none, and the whole list where no parameter has one. A master is fp32, or an
                int16 remainder (split.py); states are fp32, bf16, or int8 with scales (int8.py), those of the first
                state first. on_device is empty, or holds the hyperparameters of each group that may be tensors: one
                fp32 or fp64 where it is a tensor, else an empty tensor.
            grad_scale: one fp32; grads are divided by it.
            found_inf: one fp32; nothing moves, no step is counted, unless it is 0.
            total_sumsq: one fp64, of the grads before they are unscaled. If given, the grads are clipped to max_norm,
                and nothing moves if their unscaled norm is beyond fp32.
            outcome: two fp32; the first becomes the norm of the unscaled grads if total_sumsq is given, the second 1 if
                the step is skipped, else 0.
            skipped_steps: one fp32, counted up if the step is skipped.
            report: as ``overflow_`` has it, filled if the step is skipped; the order of memory is the parameter's.
        """
        self.step(*rows_and_groups, grad_scale, found_inf, total_sumsq, max_norm, outcome, skipped_steps, report)


def _step(rule: Rule, *arguments: Any) -> None:
    """Take a step by the rule, in plain torch."""
    call = Arguments.of(rule, arguments)
    if not call.params:
        return
    is_skipped = write_outcome(call.grad_scale, call.found_inf, call.total_sumsq, call.outcome, call.skipped_steps)
    if call.report is not None and is_skipped is not None:
        orders = [order_like(call, i) for i in range(len(call.params))]
        facts = lines(call.grads, orders, call.grad_scale, unscaled=False)
        call.report.copy_(torch.where(is_skipped, facts, call.report))
    for i, group in enumerate(call.group_numbers()):
        if call.params[i].numel() > 0:
            for old, new in _stepped(rule, call, i, group):
                _put(old, new, is_skipped)
        _put(call.steps[i], call.steps[i] + 1, is_skipped)


def order_like(call: Arguments, i: int) -> Tensor:
    """Return the tensor in whose order of memory a parameter is stepped. Codes must keep theirs, because neighbours
    share a scale."""
    states = call.states_of(i)
    return states[0] if states and states[0].dtype == torch.int8 else call.params[i]


def _stepped(rule: Rule, call: Arguments, i: int, group: int) -> list[tuple[Tensor, Tensor]]:
    """Return pairs of each tensor that a step replaces, and its new value."""
    states, scales = call.states_of(i), entry(call.scales, i)
    if scales is not None:
        scales = scales.view(-1, -(-call.params[i].numel() // int8.QUANTIZED))
    weight = _weight(call, i)
    factor, scalars = _scalars(rule, call, i, group)
    rounded = type(scalars)(*(scalar.to(weight.dtype) for scalar in scalars))
    grad = call.grads[i].to(weight.dtype) * factor.to(weight.dtype)
    weight, after = rule.step(weight, grad, _decoded(rule, states, scales), rounded)
    return _new_weight(call, i, weight) + _encoded(rule, states, after, scales)


def _scalars(rule: Rule, call: Arguments, i: int, group: int) -> tuple[Tensor, Any]:
    """Return what grads are multiplied by, and the rule's scalars, in fp64."""
    step = call.steps[i].reshape(()).double() + 1
    values = [torch.full_like(step, values_by_group[group]) for values_by_group in call.hyperparameters]
    for k, tensor in enumerate(call.on_device[rule.may_be_tensors * group :][: rule.may_be_tensors]):
        if tensor.numel():
            values[k] = tensor.reshape(()).double()
    factor = grad_factor(step, call.grad_scale, call.total_sumsq, call.max_norm)
    return -factor if call.maximize[group] else factor, rule.scalars(*values, step)


def _weight(call: Arguments, i: int) -> Tensor:
    """Return the true weight, in the computing dtype."""
    param, master = call.params[i], entry(call.masters, i)
    if master is None:
        return param.to(torch.promote_types(param.dtype, torch.float32))
    return (copied_master if master.dtype == torch.float32 else join)(param, master)


def _new_weight(call: Arguments, i: int, weight: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return pairs of what is to be replaced, and the new value."""
    param, master = call.params[i], entry(call.masters, i)
    if master is None:
        return [(param, weight)]
    if master.dtype == torch.float32:
        return [(param, weight), (master, weight)]
    return list(zip((param, master), split(weight, param.dtype), strict=True))


def _decoded(rule: Rule, states: Sequence[Tensor], scales: Tensor | None) -> list[Tensor]:
    if scales is None:
        return [state.to(torch.promote_types(state.dtype, torch.float32)) for state in states]
    keys = zip(rule.states, states, scales, strict=False)
    return [int8.decode(state, state_scales, squared=key in rule.not_negative) for key, state, state_scales in keys]


def _encoded(
    rule: Rule, states: Sequence[Tensor], values: Sequence[Tensor], scales: Tensor | None
) -> list[tuple[Tensor, Tensor]]:
    """Return pairs of what is to be replaced, and the new value. Codes share a scale with neighbours in memory."""
    if scales is None:
        return list(zip(states, values, strict=True))
    pairs = []
    for key, state, state_scales, value in zip(rule.states, states, scales, values, strict=False):
        dense = torch.empty_like(state, dtype=value.dtype).copy_(value)
        codes, new_scales = int8.encode(dense, squared=key in rule.not_negative)
        pairs += [(state, codes), (state_scales, new_scales)]
    return pairs


def _put(old: Tensor, new: Tensor, is_skipped: Tensor | None) -> None:
    """Replace a tensor's content, unless the step is skipped."""
    new = new.to(old.dtype)
    old.copy_(new if is_skipped is None else torch.where(is_skipped, old, new))
