"""Finds the places in a function where one fused op can replace several calls, in the syntax tree alone, without a
look at any module."""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from mpkernels.nn.fusing.evaluation_order import Read, reads_before, reads_of
from mpkernels.nn.fusing.inlined_names import Chain, Place, Suite, bound_in, dotted, short
from mpkernels.nn.fusing.loops import Loop, find_loops

_READ_ANY = ("locals", "vars", "dir", "eval", "exec")
KINDS = ("gated_mlp", "mlp", "gated_linear", "linear_act")  # the ops that replace most come first


@dataclass(frozen=True)
class Dropout:
    """A function that is called between the activation and the last layer, with its p and training."""

    called: ast.expr
    p: ast.expr
    training: ast.expr


@dataclass(frozen=True)
class Site:
    """Calls that one fused op can replace. It lies in statements ``first`` to ``last`` of a block: the last one holds
    ``expression``, and the others compute what the expression reads."""

    kind: str
    block: Suite
    first: int
    last: int
    expression: ast.expr
    x: ast.expr
    layers: tuple[ast.expr, ...]
    activation: ast.expr
    is_tanh_form: bool
    between: tuple[ast.expr, ...]  #: modules and functions called between activation and last layer, the last one first
    dropout: Dropout | None  #: the function among ``between``
    chunk: ast.expr | None  #: ``torch.chunk``, if it splits one layer's output into gate and up
    is_gate_last: bool  #: whether the gate is the second half of one layer's output
    reads: tuple[Read, ...] | None  #: what is read between the calls. None if more than reading may happen
    why_left: str  #: "" if the source tells no reason to leave it

    @property
    def head(self) -> list[ast.expr]:
        """Return what the statement evaluates before x, and x at the end. Nothing if x is a mere name."""
        if isinstance(self.x, ast.Name):
            return []
        node: Any = self.expression if self.first == self.last else self.block.statements[self.first].value  # type: ignore[attr-defined]
        found = []
        while node is not self.x:
            if isinstance(node.func, ast.Attribute) and any(it is self.x for it in ast.walk(node.func)):
                node = node.func.value  # the tensor in tensor.chunk(2, dim=-1)
            else:
                found.append(node.func)
                node = node.args[0]
        return [*found, self.x]

    @property
    def gates(self) -> tuple[ast.expr, ...]:
        """The layers that make gate and up: two, one that makes both, or none."""
        return self.layers[: -1 if self.kind.endswith("mlp") else None] if self.kind.startswith("gated") else ()

    @property
    def text(self) -> str:
        """The site's calls as one line, without ``self.``."""
        *layers, activation = map(short, (*self.layers, self.activation))
        hidden, packed = f"{activation}({layers[0]}(x))", ""
        if self.kind.startswith("gated"):
            is_packed = len(self.gates) == 1
            names = "up, gate" if self.is_gate_last else "gate, up"
            packed = f"{names} = {layers[0]}(x).chunk(2); " if is_packed else ""
            hidden = f"{activation}(gate) * up" if is_packed else f"{hidden} * {layers[1]}(x)"
        for called in reversed(self.between):
            hidden = f"{short(called)}({hidden})"
        return packed + (f"{layers[-1]}({hidden})" if self.kind.endswith("mlp") else hidden)

    def overlaps(self, other: "Site") -> bool:
        if self.block.statements is not other.block.statements:
            return False
        if self.first == self.last == other.first == other.last:
            orders = ((self, other), (other, self))
            return any(inner.expression is node for outer, inner in orders for node in ast.walk(outer.expression))
        return self.first <= other.last and other.first <= self.last


def find_sites(function: ast.FunctionDef) -> list[Site | Loop]:
    """Return all candidates, which may overlap, in the same order for the same source."""
    found: list[Site | Loop] = []
    for node in ast.walk(function):
        if isinstance(node, ast.Global | ast.Nonlocal) or (isinstance(node, ast.Name) and node.id in _READ_ANY):
            return found  # other code may read the function's variables
    arguments = function.args.args
    if arguments and arguments[0].arg in set().union(*map(bound_in, function.body)):
        return found  # ``self`` is assigned, so it may be another object
    found += _sites_in(function)
    for inner in _inner_functions(function):
        found += [replace(it, why_left="it stands in an inner function or a comprehension") for it in _sites_in(inner)]
    return [*found, *find_loops(function)]


def _sites_in(function: ast.FunctionDef) -> Iterator[Site]:
    for block in Suite(function, function.body).and_inner():
        for last, statement in enumerate(block.statements):
            for expression in _expressions(statement):
                for kind in KINDS:
                    yield from _matches(kind, block, last, expression)


def _inner_functions(function: ast.FunctionDef) -> Iterator[ast.FunctionDef]:
    """Yield inner functions, lambdas and comprehensions as functions with the outer one's arguments: so ``self`` is the
    first."""
    for scope in ast.walk(function):
        made = scope.body if isinstance(scope, ast.Lambda) else getattr(scope, "elt", None)
        body = [ast.copy_location(ast.Return(made), made)] if made is not None else getattr(scope, "body", [])
        if isinstance(scope, (*_SCOPES, ast.FunctionDef)) and scope is not function:
            yield ast.FunctionDef("inner", function.args, body, [])


def partition(sites: Sequence[Any], verdicts: Sequence[str | None]) -> tuple[list[int], list[tuple[int, str]]]:
    """Return the indexes of the sites to fuse, whose verdict is "", and those of the other sites with their verdicts.
    None of them overlap."""
    chosen = _without_overlaps(sites, [index for index, verdict in enumerate(verdicts) if verdict == ""], [])
    left = _without_overlaps(sites, [index for index, verdict in enumerate(verdicts) if verdict], chosen)
    return sorted(chosen), [(index, verdicts[index] or "") for index in sorted(left)]


def _without_overlaps(sites: Sequence[Any], indexes: Sequence[int], taken: Sequence[int]) -> list[int]:
    """Choose indexes of sites that don't overlap. Sites that replace more are preferred, then later ones: Linear, ReLU,
    Linear, ReLU, Linear become a linear_act and an mlp."""
    chosen: list[int] = []
    for index in sorted(indexes, key=lambda index: (KINDS.index(sites[index].kind), -index)):
        if not any(sites[index].overlaps(sites[other]) for other in (*taken, *chosen)):
            chosen.append(index)
    return chosen


_MOST_BETWEEN = 4  # timm's GatedMlp has three: a dropout, a gate, a norm
_SIMPLE = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return, ast.Expr)
_SCOPES = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def _expressions(statement: ast.stmt) -> Iterator[ast.expr]:
    if not isinstance(statement, _SIMPLE) or statement.value is None:
        return
    waiting: list[ast.AST] = [statement.value]
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, ast.Call | ast.BinOp):
            yield node
        if not isinstance(node, _SCOPES):
            waiting += ast.iter_child_nodes(node)


def _matches(kind: str, block: Suite, last: int, expression: ast.expr) -> Iterator[Site]:
    """Yield each way to read the expression as this kind: with any number of calls before the last layer, with the gate
    on either side."""
    is_block, is_gated = kind.endswith("mlp"), kind.startswith("gated")
    for passing, gate_at in product(range(1 + _MOST_BETWEEN) if is_block else (0,), (0, 1) if is_gated else (0,)):
        match = _Match(Chain(block, last))
        value = match.after(Place(expression, last), passing) if is_block else Place(expression, last)
        matched = match.gated(value, gate_at) if is_gated else match.hidden(value)
        if matched is not None and match.activation is not None:
            x, layers = matched
            first = match.chain.first_if_sound(expression, [x, *match.read])
            if first is not None:
                layers += (match.down,) if match.down is not None else ()
                before = [] if first == last else reads_before(block.statements[last], expression)
                reads = _known_reads(match.chain, [*reads_of(match.options), *before])
                found = match.activation, match.is_tanh_form, (*match.between,), match.dropout, match.chunk
                rest = match.is_gate_last, reads, match.why_left
                yield Site(kind, block, first, last, expression, x.node, layers, *found, *rest)


def _known_reads(chain: Chain, reads: list[Read]) -> tuple[Read, ...] | None:
    """Return these reads, or None if one may run unknown code. An attribute of a local variable, such as a tensor's
    method, is replaced by the variable, because it is harmless if the variable is a plain tensor."""
    harmless: list[Read] = []
    for read in reads:
        node = read.node
        if isinstance(node, ast.Name) or chain.is_own(node) or chain.is_global(node):
            harmless.append(read)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and not read.is_operand:
            harmless.append(Read(node.value, True))
        else:
            return None
    return tuple(harmless)


Layers = tuple[ast.expr, ...]


class _Match:
    """One attempt to read an expression as a site. Each method takes the place of a call and returns the place of its
    argument. None means that this method or an earlier one has failed."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.down: ast.expr | None = None
        self.activation: ast.expr | None = None
        self.is_tanh_form = False
        self.between: list[ast.expr] = []
        self.dropout: Dropout | None = None
        self.chunk: ast.expr | None = None
        self.is_gate_last = False
        self.why_left = ""
        self.options: list[ast.expr] = []  # a dropout's p and training
        self.read: list[Place] = []  # further places that the fused call reads

    def after(self, value: Place | None, passing: int) -> Place | None:
        """Match the last layer's call and, in its argument, so many calls of dropouts or identities."""
        self.down, value = self._module(value)
        for _ in range(passing):
            value = self._passed_on(value)
        return value

    def _module(self, value: Place | None) -> tuple[ast.expr | None, Place | None]:
        """Match ``self.layer(argument)``."""
        match self.chain.follow(value):
            case Place(ast.Call(layer, [argument], []), index) if self.chain.is_own(layer):
                return (None, None) if isinstance(argument, ast.Starred) else (layer, Place(argument, index))
        return None, None

    def _passed_on(self, value: Place | None) -> Place | None:
        """Match the call of a module, or of a function with p and training."""
        called, argument = self._module(value)
        if called is not None:
            self.between.append(called)
            return argument
        match self.chain.follow(value):
            case Place(ast.Call(function, [x, *positional], keywords), index) if self.chain.is_global(function):
                options = dict(zip(("p", "training"), positional, strict=False)) | {it.arg: it.value for it in keywords}
                if self.dropout or len(positional) > 2 or options.keys() != {"p", "training"}:
                    return None
                self.between.append(function)
                self.dropout = Dropout(function, options["p"], options["training"])
                self.options = [*options.values()]
                self.read += [Place(option, index) for option in self.options]
                return Place(x, index)
        return None

    def activated(self, value: Place | None) -> Place | None:
        self.activation, z = self._module(value)
        if z is not None:
            return z
        match self.chain.follow(value):
            case Place(ast.Call(called, [argument, *others], keywords), index) if self.chain.is_global(called):
                self.activation, options = called, [ast.unparse(it) for it in (*others, *keywords)]
                self.is_tanh_form = options == ["approximate='tanh'"]
                if not self.is_tanh_form and options not in ([], ["approximate='none'"]):
                    self.why_left = f"{short(called)} is called with {', '.join(options)}"
                return Place(argument, index)
        return None

    def hidden(self, value: Place | None) -> tuple[Place, Layers] | None:
        layer, x = self._module(self.activated(value))
        return None if layer is None or x is None else (x, (layer,))

    def gated(self, value: Place | None, gate_at: int) -> tuple[Place, Layers] | None:
        value = self.chain.follow(value)
        if value is None or not isinstance(node := value.node, ast.BinOp) or not isinstance(node.op, ast.Mult):
            return None
        sides = [Place(side, value.index) for side in (node.left, node.right)]
        gate, up = self.activated(sides[gate_at]), sides[1 - gate_at]
        return self._two_layers(gate, up) or self._one_layer(gate, up)

    def _two_layers(self, gate: Place | None, up: Place) -> tuple[Place, Layers] | None:
        """Match ``self.gate_layer(x)`` and ``self.up_layer(x)``."""
        (gate_layer, x), (up_layer, same_x) = self._module(gate), self._module(up)
        if gate_layer is None or up_layer is None or x is None or same_x is None:
            return None
        if dotted(gate_layer) == dotted(up_layer):
            return None
        is_same = isinstance(x.node, ast.Name) and isinstance(same_x.node, ast.Name) and x.node.id == same_x.node.id
        self.read.append(same_x)
        return (x, (gate_layer, up_layer)) if is_same else None

    def _one_layer(self, gate: Place | None, up: Place) -> tuple[Place, Layers] | None:
        """Match ``gate, up = self.layer(x).chunk(2, dim=-1)``, and the same with the gate last."""
        first, second = self.chain.half(gate), self.chain.half(up)
        if first is None or second is None or first.call is not second.call:
            return None
        if {first.which, second.which} != {0, 1}:
            return None
        layer, x = self._module(first.packed)
        self.chunk, self.is_gate_last = first.function, first.which == 1
        return None if layer is None or x is None else (x, (layer,))
