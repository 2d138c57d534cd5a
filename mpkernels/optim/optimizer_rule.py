"""Translates an optimizer's parameter groups for a rule of mpkernels.ops. Each optimizer's own file names its rule; the
other files of this room name none."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from mpkernels.ops.step.op import StepOps

Group = Mapping[str, Any]


class OptimizerRule(NamedTuple):
    ops: StepOps
    hyperparameters: Callable[[Group], tuple[Any, ...]]  # of a group, in the order in which the rule names them
    # Whether a group's parameters have the states that the rule can do without.
    has_optional: Callable[[Group], bool] = lambda _: False

    def keys(self, group: Group) -> tuple[str, ...]:
        """Return the keys of a parameter's states."""
        rule = self.ops.rule
        return rule.states if self.has_optional(group) else rule.states[: rule.needed]

    def is_squared(self, key: str) -> bool:
        """Return whether a state is never negative, so that its 8-bit code is that of a root."""
        return key in self.ops.rule.not_negative
