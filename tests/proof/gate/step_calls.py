"""Common calls of each rule's op, in which all parameters are alike. Their kernels serve no other parameters, and need
fewer registers."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from mpkernels.ops.step.rule import Rule
from tests.ops.step.rules_table import RULES

BF16, FP32 = torch.bfloat16, torch.float32


def _step(
    rule: Rule, states: int, dtype: torch.dtype, state_dtype: torch.dtype, master: torch.dtype | None = None
) -> tuple[Any, ...]:
    param = torch.ones(512, dtype=dtype)
    masters = [] if master is None else [torch.ones_like(param, dtype=master)]
    scales = [torch.ones(2 * states)] if state_dtype == torch.int8 else []
    lists = [[torch.ones_like(param, dtype=state_dtype)] if i < states else [] for i in range(len(rule.states))]
    hyperparameters = [[0.5] for _ in rule.hyperparameters]
    scalars = [torch.ones(()), torch.zeros(()), torch.ones((), dtype=torch.float64), 1.0, torch.zeros(2)]
    rows = [param], [param.clone()], *lists, masters, scales, [torch.ones(())]
    return *rows, [1], *hyperparameters, [False], [], *scalars, torch.zeros(()), None


def _steps(rule: Rule) -> Iterator[tuple[Any, ...]]:
    for states in (rule.needed,) if rule.needed else (0, len(rule.states)):
        yield _step(rule, states, FP32, FP32)
        yield _step(rule, states, BF16, FP32, master=torch.int16)
        yield _step(rule, states, BF16, FP32, master=FP32)
        yield _step(rule, states, torch.float64, torch.float64)
        if states:
            yield _step(rule, states, BF16, BF16, master=torch.int16)
            yield _step(rule, states, BF16, torch.int8, master=torch.int16)
            yield _step(rule, states, FP32, torch.int8)


CALLS: dict[str, Callable[[], Iterator[tuple[Any, ...]]]] = {
    line.ops.rule.op: partial(_steps, line.ops.rule) for line in RULES.values()
}
