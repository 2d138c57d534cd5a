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


def _scaled(scaled: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return SGD's hyperparameters: its grad is the update, and weight_decay doesn't follow a shape's learning rate."""
    group, ratio = scaled["group"], scaled["ratio"]
    return group["lr"] * ratio, group["weight_decay"] / ratio, 0.0, 0.0, False


_SGD = OptimizerRule(sgd_, _scaled)


def _ratio(adjust_lr_fn: str | None, shape: Sequence[int]) -> float:
    """Return by how much the learning rate of matrices of this shape is larger, as torch.optim.Muon has it."""
    rows, columns = shape
    if 0 in shape:
        return 1.0
    return 0.2 * math.sqrt(max(shape)) if adjust_lr_fn == "match_rms_adamw" else math.sqrt(max(1, rows / columns))


class _Layout(NamedTuple):
    """Where the updates of a matrix may lie. Those of one layout make a stack."""

    shape: tuple[int, ...]  # of this process's part of a matrix, in its order of memory
    order: tuple[int, ...]  # its dimensions in that order
    dtype: torch.dtype
    exchange: Exchange | None

    @classmethod
    def of(cls, param: Tensor, buffer: Tensor) -> "_Layout":
        exchange, part = exchange_of(param), part_of(buffer)
        order = (0, 1) if exchange else tuple(order_of_memory(part))
        dtype = torch.float64 if param.dtype == torch.float64 else torch.bfloat16  # an op takes fp64 with fp64 alone
        return cls(tuple(part.permute(order).shape), order, dtype, exchange)


class _Stack:
    """The updates of some matrices, side by side in memory."""

    def __init__(self, layout: _Layout, groups: list[Group], device: torch.device) -> None:
        self._updates = torch.zeros(len(groups), *layout.shape, dtype=layout.dtype, device=device)
        self._groups, self._exchange = groups, layout.exchange
        self.views = [update.permute(layout.order) for update in self._updates.unbind()]

    @property
    def is_exchanged(self) -> bool:
        """Whether other processes hold parts of the matrices."""
        return self._exchange is not None

    def orthogonalize(self, turn: int) -> int:
        """Replace the updates by orthogonal matrices. Return whose turn it is to work on the next stack's first."""
        if self._exchange is None:
            orthogonalize_(self._updates, self._groups)
            return turn
        owned = self._exchange.owned(len(self._groups), turn)
        wholes = self._exchange.gather(self._updates, owned)
        orthogonalize_(wholes, owned.mine(self._groups))
        self._exchange.scatter(wholes, self._updates, owned)
        return turn + len(self._groups)


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
            by_layout[_Layout.of(param, state["momentum_buffer"])].append(i)
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
            group = all_rows[there[0]][0]
            scaled = {"group": group, "ratio": _ratio(group["adjust_lr_fn"], shape), "maximize": False}
            rows += [(scaled, all_rows[i][1], _among(all_rows[i][2], True)) for i in there]
        self._weights = Plan(_SGD, rows, list(range(len(rows))), None, None, is_for_once)
        self._updates = [updates[i] for there in by_rate.values() for i in there]
        self.device = self._momentum.device
        self.has_16_bit_parameters = self._weights.has_16_bit_parameters

    def look(self, grads: list[Any]) -> tuple[Tensor, Tensor]:
        """Return the sum of the grads' squares, and whether one holds an inf or NaN."""
        if any(stack.is_exchanged for stack in self._stacks):  # other processes must hear of an error before they wait
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
        self._momentum.step(grads, verdict._replace(outcome=outcome), max_norm, skipped_steps)
        self._step_weights(outcome)

    def _step_weights(self, outcome: Tensor | None) -> None:
        """Orthogonalize the updates and step by them. A skipped step has left old ones in the stacks."""
        turn = 0
        for stack in self._stacks:
            turn = stack.orthogonalize(turn)
        self._weights.step(self._updates, Verdict(found_inf=None if outcome is None else outcome[1]))


def _among(state: State, masters: bool) -> State:
    """Return a state's master alone, or all else."""
    return {key: value for key, value in state.items() if (key in KEYS.values()) == masters}
