"""The plan of a step of Muon: momentum in one launch, Newton-Schulz once for each shape, weights in one launch."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpkernels._shared.parameters import order_of_memory
from mpkernels.distributed.exchange import Exchange, exchange_of
from mpkernels.distributed.parts import part_of
from mpkernels.distributed.shares import Parts
from mpkernels.ops.step.rules.sgd import sgd_
from mpkernels.optim.masters import KEYS
from mpkernels.optim.newton_schulz import orthogonalize_
from mpkernels.optim.optimizer_rule import OptimizerRule
from mpkernels.optim.plan import Group, Plan, State
from mpkernels.optim.step_plan import Verdict
from mpkernels.overflow.ledger import Ledger


# SGD's rule computes Muon, too. With a momentum of m, the momentum's step steps what is 0 by lr = m - 1, so that the
# update is left: (1 - m) * (grad + m / (1 - m) * buffer), or the buffer, which is m * buffer + (1 - m) * grad.
def _momentum(group: Mapping[str, Any]) -> tuple[Any, ...]:
    momentum = float(group["momentum"])
    if not group["nesterov"] or momentum == 1:
        return -1.0, 0.0, momentum, momentum, 0.0
    return momentum - 1, 0.0, momentum, momentum, 1 / (1 - momentum)


# The weights' step takes the orthogonalized updates for grads. The decay doesn't follow the learning rate of a shape.
def _weights(scaled: Mapping[str, Any]) -> tuple[Any, ...]:
    group, (rows, columns) = scaled["group"], scaled["shape"]
    is_like_adamw = group["adjust_lr_fn"] == "match_rms_adamw"
    ratio = 0.2 * math.sqrt(max(1, rows, columns)) if is_like_adamw else math.sqrt(max(1, rows / max(1, columns)))
    return group["lr"] * ratio, group["weight_decay"] / ratio, 0.0, 0.0, 0.0


MOMENTUM, _WEIGHTS = OptimizerRule(sgd_, _momentum, lambda _: True), OptimizerRule(sgd_, _weights)


class _Layout(NamedTuple):
    """Where the updates of a matrix may lie. Those of one layout make a stack."""

    shape: tuple[int, ...]  # of this process's part of a matrix, in its order of memory
    order: tuple[int, ...]  # its dimensions in that order
    dtype: torch.dtype
    exchange: Exchange | None


def _layout(param: Tensor, buffer: Tensor) -> _Layout:
    exchange, part = exchange_of(param), part_of(buffer)
    order = (0, 1) if exchange else tuple(order_of_memory(part))
    dtype = torch.float64 if param.dtype == torch.float64 else torch.bfloat16  # an op takes fp64 with fp64 alone
    return _Layout(tuple(part.permute(order).shape), order, dtype, exchange)


class _Stack:
    """The updates of some matrices, side by side in memory."""

    def __init__(self, layout: _Layout, groups: list[Group], device: torch.device) -> None:
        self.updates = torch.empty(len(groups), *layout.shape, dtype=layout.dtype, device=device)
        self.groups, self.exchange = groups, layout.exchange
        self.views = [update.permute(layout.order) for update in self.updates.unbind()]

    def orthogonalize(self, turn: int) -> None:
        """Replace the updates by orthogonal matrices. ``turn``: which process is to work on one more than others."""
        if self.exchange is None:
            orthogonalize_(self.updates, self.groups)
        else:
            self.exchange.work_on_wholes(self.updates, turn, lambda it, which: orthogonalize_(it, self.groups[which]))


class MuonPlan:
    """The matrices of one device, with the methods that a plan has."""

    has_grads = True

    def __init__(
        self,
        rule: OptimizerRule,
        all_rows: Sequence[tuple[Group, Tensor, State]],
        places: list[int],
        ledger: Ledger | None = None,
        parts: Parts | None = None,
        is_for_once: bool = False,
    ) -> None:
        """As ``Plan`` has it."""
        by_layout, by_rate = defaultdict(list), defaultdict(list)
        for i in places:
            group, param, state = all_rows[i]
            by_layout[_layout(param, state["momentum_buffer"])].append(i)
            by_rate[id(group), tuple(param.shape)].append(i)
        self._stacks: list[_Stack] = []
        updates: dict[int, Tensor] = {}
        for layout, there in by_layout.items():
            stack = _Stack(layout, [all_rows[i][0] for i in there], part_of(all_rows[there[0]][1]).device)
            self._stacks.append(stack)
            updates.update(zip(there, stack.views, strict=True))
        bare = [(group, param, _among(state, False)) for group, param, state in all_rows]
        targets = [updates[i] for i in places]
        self._momentum = Plan(rule, bare, places, ledger, parts, is_for_once, targets)
        rows = []
        for (_, shape), there in by_rate.items():
            scaled = {"group": all_rows[there[0]][0], "shape": shape, "maximize": False}
            rows += [(scaled, all_rows[i][1], _among(all_rows[i][2], True)) for i in there]
        self._weights = Plan(_WEIGHTS, rows, list(range(len(rows))), None, None, is_for_once)
        self._updates = [updates[i] for there in by_rate.values() for i in there]
        self.device = self._momentum.device
        self.has_16_bit_parameters = self._weights.has_16_bit_parameters

    def look(self, grads: list[Any]) -> tuple[Tensor, Tensor]:
        """Return the sum of the grads' squares, and whether one holds an inf or NaN."""
        if any(stack.exchange for stack in self._stacks):  # other processes must hear of an error before they wait
            self._momentum.check(grads)
            self._weights.check(self._updates)
        return self._momentum.look(grads)

    @property
    def has_moved(self) -> bool:
        """Tell whether a parameter has gone to another device or dtype, or its part to another tensor."""
        return self._weights.has_moved

    first_has_moved = has_moved  # the momentum must not move if the weights then can't

    def look_and_step(
        self, grads: list[Any], verdict: Verdict, max_norm: float | None, skipped_steps: Tensor | None
    ) -> bool:
        """Look at the grads and step, if C++ has a call that looks and moves the momentum; else return False."""
        self._clear()
        has_stepped = self._momentum.look_and_step(grads, verdict, max_norm, skipped_steps)
        if has_stepped:
            self._step_weights(verdict.outcome)
        return has_stepped

    def step(
        self, grads: list[Any], verdict: Verdict, max_norm: float | None = None, skipped_steps: Tensor | None = None
    ) -> None:
        """Take one step, or skip it if the verdict is an overflow. ``skipped_steps``, if given, counts the skips."""
        outcome = verdict.outcome
        if outcome is None and (verdict.found_inf is not None or verdict.grad_scale is not None):
            outcome = torch.empty(2, dtype=torch.float32, device=self.device)
        self._clear()
        self._momentum.step(grads, verdict._replace(outcome=outcome), max_norm, skipped_steps)
        self._step_weights(outcome)

    def _clear(self) -> None:
        for stack in self._stacks:
            stack.updates.zero_()

    def _step_weights(self, outcome: Tensor | None) -> None:
        """Orthogonalize the updates, which are 0 in a skipped step, and step by them."""
        turn = 0
        for stack in self._stacks:
            stack.orthogonalize(turn)
            turn += len(stack.groups)
        self._weights.step(self._updates, Verdict(found_inf=None if outcome is None else outcome[1]))


def _among(state: State, masters: bool) -> State:
    """Return a state's master alone, or all else."""
    return {key: value for key, value in state.items() if (key in KEYS.values()) == masters}
