"""The schemas of a step's ops, and their arguments by name."""

from collections.abc import Sequence
from itertools import count
from typing import Any, NamedTuple

from torch import Tensor

from mpkernels.ops.step.rule import Rule


class Arguments(NamedTuple):
    """In an optional list, the entry of a parameter that has none is an empty tensor."""

    params: Sequence[Tensor]
    grads: Sequence[Tensor]
    states: Sequence[Sequence[Tensor]]  # one list for each of the rule's states; those after ``needed`` are optional
    masters: Sequence[Tensor]  # optional, as is the whole list
    scales: Sequence[Tensor]  # likewise
    steps: Sequence[Tensor]
    group_sizes: Sequence[int]
    hyperparameters: Sequence[Sequence[float]]  # for each of the rule's, the values of all groups
    maximize: Sequence[bool]
    on_device: Sequence[Tensor]
    grad_scale: Tensor | None
    found_inf: Tensor | None
    total_sumsq: Tensor | None
    max_norm: float
    outcome: Tensor | None
    skipped_steps: Tensor | None
    report: Tensor | None

    @classmethod
    def of(cls, rule: Rule, arguments: Sequence[Any]) -> "Arguments":
        """Return the arguments that the rule's op has been called with."""
        after_states = 2 + len(rule.states)
        first = after_states + 4  # the place of the first hyperparameter
        last = first + len(rule.hyperparameters)
        states, hyperparameters = arguments[2:after_states], arguments[first:last]
        named = *arguments[:2], states, *arguments[after_states:first], hyperparameters, *arguments[last:]
        return cls._make(named)

    def group_numbers(self) -> list[int]:
        """Return the number of each parameter's group."""
        return [group for group, size in enumerate(self.group_sizes) for _ in range(size)]

    def states_of(self, i: int) -> list[Tensor]:
        """Return the states that a parameter has."""
        found = (entry(tensors, i) for tensors in self.states)
        return [state for state in found if state is not None]


def entry(tensors: Sequence[Tensor], i: int) -> Tensor | None:
    """Return an entry of an optional list; None where a parameter has none."""
    return tensors[i] if tensors and tensors[i].numel() else None


def schemas(rule: Rule) -> tuple[str, str, str, str]:
    """Return the schemas of the step, and of three ops on states that C++ keeps, called a plan: to make a plan, to step
    by it, to forget it."""
    states = [f"Tensor(!)[] {name}" for name in (*rule.state_lists, "masters", "scales", "steps")]
    weights = "Tensor(!)[] params, Tensor[] grads"
    options = ", ".join(
        (
            *(f"float[] {name}" for name in rule.hyperparameters),
            "bool[] maximize, Tensor[] on_device, Tensor? grad_scale, Tensor? found_inf, Tensor? total_sumsq",
            "float max_norm, Tensor(!)? outcome, Tensor(!)? skipped_steps, Tensor(!)? report",
        )
    )
    return (
        _lettered(f"{rule.op}({weights}, {', '.join(states)}, int[] group_sizes, {options}) -> ()"),
        f"{rule.name}_plan({', '.join(states).replace('(!)', '')}, int[] group_sizes) -> int",
        _lettered(f"{rule.name}_by_plan_(int plan, {weights}, {options}, bool guarded) -> ()"),
        f"{rule.name}_forget(int plan) -> ()",
    )


def _lettered(schema: str) -> str:
    """Return the schema with a letter of its own for each argument that is written: (a!), (b!)."""
    first, *rest = schema.split("(!)")
    return first + "".join(f"({chr(ord('a') + i)}!){part}" for i, part in zip(count(), rest, strict=False))
