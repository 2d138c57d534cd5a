"""What an optimizer's rule says of itself. The code of a step uses only this, and names no rule."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor


class Rule(NamedTuple):
    name: str  # the op's, without its underscore
    states: tuple[str, ...]  # the states of a parameter, by their keys; the op takes a list of each: exp_avgs
    needed: int  # how many of the states are always there; the others depend on an option
    not_negative: tuple[str, ...]  # the states that are never negative; 8-bit codes hold their roots
    hyperparameters: tuple[str, ...]  # of a group
    may_be_tensors: int  # how many of the hyperparameters, from the first on, may be tensors on the device
    saves_steps: bool  # whether checkpoints hold the number of steps of each parameter
    # Takes the hyperparameters of a group and the number of this step, 1 at the first step, as 0-dim fp64 tensors or
    # floats. Returns a named tuple of such numbers, which all elements of a parameter share.
    scalars: Callable[..., Any]
    # Takes the weight, the unscaled grad, the states that are there and the scalars, in the computing dtype. Returns
    # the new weight and the new states.
    step: Callable[[Tensor, Tensor, list[Tensor], Any], tuple[Tensor, list[Tensor]]]

    @property
    def op(self) -> str:
        return f"{self.name}_"

    @property
    def lists(self) -> tuple[str, ...]:
        """Return the names of the op's arguments that go parameter by parameter, in their order."""
        return "params", "grads", *self.state_lists, "masters", "scales", "steps"

    @property
    def state_lists(self) -> tuple[str, ...]:
        return tuple(f"{state}s" for state in self.states)

    @property
    def optional_lists(self) -> tuple[str, ...]:
        """Return the names of the lists in which an entry may be empty, as may be the whole list."""
        return *self.state_lists[self.needed :], "masters", "scales"
