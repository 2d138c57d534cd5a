"""Finds runs of modules that one fused op can replace, among modules that torch.nn.Sequential or a loop over a
torch.nn.ModuleList calls one after another."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import Dropout, Identity, Module, ModuleList, Sequential

from mpkernels._torch_private.modules import books_of
from mpkernels.nn.fusing import calls, choices, projections
from mpkernels.nn.fusing.originals import LIST_ITER, SEQUENTIAL_ITER
from mpkernels.nn.fusing.recognise import is_activation, is_layer, known_activation, why_not


class Run(NamedTuple):
    """A run of modules: a linear layer and an activation, or a projection that is both. An MLP goes on with any
    dropouts and identities, and another linear layer."""

    kind: str
    first: int
    last: int
    has_projection: bool = False

    def overlaps(self, other: "Run") -> bool:
        return self.first <= other.last and other.first <= self.last

    def parts(self, modules: Sequence[Module]) -> tuple[list[Module], object, list[Module]]:
        """Return the linear layers, the activation, and the modules between the activation and the last layer."""
        layer, *rest = modules[self.first : self.last + 1]
        activation: object
        if self.has_projection:
            layer, activation = projections.taken_apart(layer)
        else:
            activation, *rest = rest
        return [layer, *rest[-1:]], activation, rest[:-1]

    def projection(self, modules: Sequence[Module]) -> list[Module]:
        return [modules[self.first]] if self.has_projection else []

    def is_plain(self, x: Any, modules: Sequence[Module]) -> bool:
        if self.last >= len(modules):
            return False
        is_gated = self.kind == "gated_mlp"
        for first in self.projection(modules):
            if projections.why_no_projection(first) is not None or projections.is_gated(first) != is_gated:
                return False
        layers, activation, between = self.parts(modules)
        if not calls.are_plain(x, layers, activation, between):
            return False
        return not self.has_projection or (projections.is_usual_on(x) and (not is_gated or calls.are_gates(layers[:1])))

    def is_ours(self, owner: Module, site: str, x: Any, modules: Sequence[Module]) -> bool | None:
        """Return whether the fused op computes this run, a site of ``owner``. None if it isn't plain."""
        verdict = choices.verdict(owner, site, x)
        if verdict is False:
            return False
        if not self.is_plain(x, modules):
            return None
        layers, activation, between = self.parts(modules)
        return verdict or choices.is_ours(owner, site, self.kind, x, layers, activation, between, is_gate_last=True)

    def compute(self, x: Tensor, modules: Sequence[Module]) -> Tensor:
        layers, activation, between = self.parts(modules)
        return calls.fused(self.kind, x, layers, activation, between, is_gate_last=True)

    def why_left(self, modules: Sequence[Module]) -> str:
        """Return why an op of ours can't compute this. "" if it can."""
        first = modules[self.first]
        if self.has_projection and (reason := projections.why_no_projection(first)) is not None:
            return f"{type(first).__name__} {reason}"
        layers, activation, between = self.parts(modules)
        return why_not(_named(layers), _named([activation]), _named(between))

    def text(self, modules: Sequence[Module]) -> str:
        return ", ".join(type(module).__name__ for module in modules[self.first : self.last + 1])

    def computed_by(self, modules: Sequence[Module]) -> str:
        layers, activation, _ = self.parts(modules)
        name = known_activation(activation)
        return f"{self.kind}, {name}{choices.note_on(self.kind, layers, activation, name)}"


def _named(modules: Sequence[object]) -> list[tuple[str, object]]:
    return [(type(module).__name__, module) for module in modules]


def runs_of(modules: Sequence[Module]) -> list[Run]:
    """Return all candidates, which may overlap."""
    runs = []
    for at, module in enumerate(modules):
        if projections.is_projection(module):
            kind, after = "gated_mlp" if projections.is_gated(module) else "mlp", at + 1
        elif is_layer(module) and is_activation(modules[min(at + 1, len(modules) - 1)]):
            kind, after = "mlp", at + 2
            runs.append(Run("linear_act", at, at + 1))
        else:
            continue
        while after < len(modules) and isinstance(modules[after], Dropout | Identity):
            after += 1
        if after < len(modules) and is_layer(modules[after]):
            runs.append(Run(kind, at, after, projections.is_projection(module)))
    return runs


def modules_of(module: Any) -> list[Module]:
    """Return the modules as torch iterates over a Sequential or ModuleList: one in two places comes twice."""
    return [*books_of(vars(module))[-1].values()]


def is_plain_list(modules: Any) -> bool:
    """Return whether torch's own code iterates over these."""
    if issubclass(type(modules), Sequential):
        return type(modules).__iter__ is SEQUENTIAL_ITER
    return type(modules) is ModuleList and ModuleList.__iter__ is LIST_ITER


def run_all(owner: Module, loop: str, container: Any, runs: Sequence[tuple[Any, ...]], value: Any) -> Any:
    """Call the modules one after another, with a fused op in place of each run that is plain and ours. ``loop`` is the
    loop's name in the module whose forward it stands in."""
    run_at, start = {run[1]: Run(*run) for run in runs}, value
    left: list[str] = []
    modules, at = modules_of(container), 0
    while at < len(modules):
        run, site = run_at.get(at), f"{loop}.{at}"
        is_ours = None if run is None else run.is_ours(owner, site, value, modules)
        if run is not None and is_ours:
            value, at = run.compute(value, modules), run.last + 1
            continue
        if is_ours is False:
            left.append(site)
        value, at = modules[at](value), at + 1
        modules = modules_of(container)  # the call may have changed the container
    if len(left) == len(runs):
        choices.leave_loop(owner, loop, left, start)
    return value
