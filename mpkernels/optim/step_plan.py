"""What a step knows of its grads, and what it asks of a plan, whoever computes the step."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from mpkernels.distributed.processes import Processes


class Verdict(NamedTuple):
    """What is known of the grads of all devices and processes before the step, as a step takes it."""

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None
    total_sumsq: Tensor | None = None
    outcome: Tensor | None = None  # to be filled: the norm of the grads, and whether the step was skipped
    has_norm: bool = False


class StepPlan(Protocol):
    """Parameters that step together. Plans that are kept also say whether their parameters have moved."""

    device: torch.device  # of the norm and the verdict
    has_16_bit_parameters: bool
    has_grads: bool  # whether there is anything to look at

    def look(self, grads: list[Any]) -> tuple[Tensor, Tensor]:
        """Return the sum of the grads' squares, and whether one holds an inf or NaN."""

    def look_and_step(
        self, grads: list[Any], verdict: Verdict, max_norm: float | None, skipped_steps: Tensor | None
    ) -> bool:
        """Do both in one call, if there is one that does. Return whether that is so; otherwise do nothing."""

    def step(
        self, grads: list[Any], verdict: Verdict, max_norm: float | None = None, skipped_steps: Tensor | None = None
    ) -> bool | None:
        """Take one step, or skip it if the verdict is an overflow. ``skipped_steps``, if given, counts the skips.
        Return whether the step was skipped, if the host knows."""


class BeforeStep(NamedTuple):
    """What an optimizer knows when it has looked at its grads."""

    plans: Sequence[StepPlan]
    grads: list[Any]  # as the plans take them
    verdict: Verdict  # this process's
    processes: Processes | None = None  # that have to agree on one
    has_stepped: bool = False  # in the call that has looked
