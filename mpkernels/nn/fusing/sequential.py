"""torch.nn.Sequential, whose forward is a loop: the runs of its modules that one fused op can replace."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import Dropout, Module

from mpkernels._torch_private.modules import books_of
from mpkernels.nn.fusing import calls
from mpkernels.nn.fusing.originals import SEQUENTIAL_FORWARD, SEQUENTIAL_ITER
from mpkernels.nn.fusing.recognise import (
    is_activation,
    is_linear,
    known_activation,
    why_never,
    why_no_activation,
    why_no_dropout,
)


class Run(NamedTuple):
    """Modules that follow each other: linear, activation and, for an mlp, perhaps a dropout and another linear."""

    kind: str
    first: int
    last: int

    def overlaps(self, other: "Run") -> bool:
        return self.first <= other.last and other.first <= self.last

    def parts(self, modules: Sequence[Module]) -> tuple[list[Module], Module, Module | None]:
        """Return linear layers, activation and dropout."""
        own = modules[self.first : self.last + 1]
        layers = [own[0], own[-1]] if self.kind == "mlp" else [own[0]]
        return layers, own[1], own[2] if len(own) == 4 else None

    def is_plain(self, x: Any, modules: Sequence[Module]) -> bool:
        return self.last < len(modules) and calls.are_plain(x, *self.parts(modules))

    def compute(self, x: Tensor, modules: Sequence[Module]) -> Tensor:
        layers, activation, dropout = self.parts(modules)
        if self.kind == "linear_act":
            return calls.linear_act(x, layers, activation)
        if isinstance(dropout, Dropout):
            return calls.mlp(x, layers, activation, dropout.p, dropout.training)
        return calls.mlp(x, layers, activation)

    def why_left(self, modules: Sequence[Module]) -> str:
        """Return why an op of ours can't compute this. "" if it can."""
        layers, activation, dropout = self.parts(modules)
        reasons = [(layer, why_never(layer)) for layer in layers]
        reasons.append((activation, why_no_activation(activation)))
        reasons += [] if dropout is None else [(dropout, why_no_dropout(dropout))]
        return next((f"{type(module).__name__} {why}" for module, why in reasons if why is not None), "")

    def text(self, modules: Sequence[Module]) -> str:
        return ", ".join(type(it).__name__ for it in modules[self.first : self.last + 1])

    def computed_by(self, modules: Sequence[Module]) -> str:
        return f"{self.kind}, {known_activation(modules[self.first + 1])}"


def runs_of(modules: Sequence[Module]) -> list[Run]:
    """Return all candidates, which may overlap."""
    runs = []
    for at in range(len(modules) - 1):
        if is_linear(modules[at]) and is_activation(modules[at + 1]):
            runs.append(Run("linear_act", at, at + 1))
            last = at + 3 if isinstance(modules[min(at + 2, len(modules) - 1)], Dropout) else at + 2
            if last < len(modules) and is_linear(modules[last]):
                runs.append(Run("mlp", at, last))
    return runs


def modules_of(module: Any) -> list[Module]:
    """Return what torch's own iteration over a Sequential yields: a module in two places twice."""
    return [*books_of(vars(module))[-1].values()]


def forward_of(runs: Sequence[Run], kind: Any) -> Callable[[Any, Any], Any]:
    by_start = {run.first: run for run in runs}

    @wraps(SEQUENTIAL_FORWARD)  # whose source torch.jit.script reads
    def forward(self: Any, input: Any) -> Any:
        if kind.forward is not SEQUENTIAL_FORWARD or kind.__iter__ is not SEQUENTIAL_ITER:  # they were replaced since
            return kind.forward(self, input)
        modules, at = modules_of(self), 0
        while at < len(modules):
            run = by_start.get(at)
            if run is not None and run.is_plain(input, modules):
                input, at = run.compute(input, modules), run.last + 1
            else:
                input, at = modules[at](input), at + 1
                modules = modules_of(self)  # which the call may have changed
        return input

    return forward
