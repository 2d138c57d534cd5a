"""The plan of a step that another optimizer takes, which can't skip: the host waits for the verdict."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mpkernels._shared.parameters import by_device, put_on, real_values
from mpkernels.distributed.parts import parts_of
from mpkernels.distributed.shares import Parts
from mpkernels.ops.step.skip_and_clip import grad_factor, write_outcome
from mpkernels.optim import norm_without_plan
from mpkernels.optim.masters import needs_master
from mpkernels.optim.step_plan import Verdict
from mpkernels.overflow.ledger import Ledger


class WrappedPlan:
    """All parameters of an optimizer, wherever they are, for one step."""

    def __init__(
        self, params: list[Tensor], parts: Parts | None, ledger: Ledger, take_step: Callable[[float], None]
    ) -> None:
        """take_step: has the optimizer step with grads multiplied by a number."""
        self._params, self._parts, self._ledger, self._take_step = params, parts, ledger, take_step
        self._places = [i for i, param in enumerate(params) if param.grad is not None]
        self.has_grads = bool(self._places)
        self.device = params[0].device if params else torch.device("cpu")
        self.has_16_bit_parameters = any(map(needs_master, params))

    def look(self, grads: list[Any]) -> tuple[Tensor, Tensor]:
        """Return the sum of the grads' squares, and whether one holds an inf or NaN."""
        stepped = [self._params[i] for i in self._places]
        shares = None if self._parts is None else self._parts.shares(stepped)
        return norm_without_plan.look(parts_of([grads[i] for i in self._places]), shares, self.device)

    def look_and_step(self, *_: Any) -> bool:
        """Return False: the wrapped optimizer's step doesn't look."""
        return False

    def step(
        self, grads: list[Any], verdict: Verdict, max_norm: float | None = None, skipped_steps: Tensor | None = None
    ) -> bool | None:
        """Have the optimizer step, or skip the step if the verdict is an overflow. Return whether it was skipped, if
        somebody has looked. The outcome is written last: a scaler takes a step that has written it for done."""
        if verdict.outcome is None:
            self._take_step(1.0)
            return None
        scale, found_inf, total_sumsq = (None if it is None else put_on(self.device, it) for it in verdict[:3])
        outcome = torch.zeros(2, dtype=torch.float32, device=self.device)
        write_outcome(scale, found_inf, total_sumsq, outcome, None)
        factor = grad_factor(outcome[0], scale, total_sumsq, max_norm or math.inf)
        is_skipped, number = torch.stack([outcome[1].double(), factor]).tolist()
        if is_skipped > 0:
            self._report(grads, verdict)
        else:
            self._take_step(float(number))
        verdict.outcome.copy_(outcome)
        if skipped_steps is not None:
            skipped_steps.add_(is_skipped > 0)
        return bool(is_skipped > 0)

    def _report(self, grads: list[Any], verdict: Verdict) -> None:
        """Note in the ledger the facts about the grads of a skipped step."""
        parts = parts_of([grads[i] for i in self._places])
        there = by_device(parts, zip(self._places, parts, strict=True))
        self._ledger.keep(there)
        for device, items in there.items():
            found_inf, params = torch.ones((), device=device), [self._params[i] for i, _ in items]
            numbers = [real_values(norm_without_plan.numbers(grad)) for _, grad in items]
            self._ledger.fill(params, numbers, found_inf, verdict.grad_scale, False, lambda: self._params)
