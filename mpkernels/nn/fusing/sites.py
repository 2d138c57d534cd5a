"""Finds the places in a function where one fused op can replace several calls, in the syntax tree alone, without a
look at any module."""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from mpkernels.nn.fusing.evaluation_order import Read, reads_before, reads_of
from mpkernels.nn.fusing.inlined_names import Chain, Place, Suite, bound_in, short
from mpkernels.nn.fusing.loops import Loop, find_loops
from mpkernels.nn.fusing.match import Dropout, Match

_READ_ANY = ("locals", "vars", "dir", "eval", "exec")
KINDS = ("gated_mlp", "mlp", "gated_linear", "linear_act")  # the ops that replace most come first


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
    is_squared: bool  #: whether the activation's result is squared
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
            if isinstance(node, ast.BinOp):
                node = node.left  # what is squared
            elif isinstance(node.func, ast.Attribute) and any(it is self.x for it in ast.walk(node.func)):
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
        square = ".square()" if self.is_squared else ""
        hidden, packed = f"{activation}({layers[0]}(x)){square}", ""
        if self.kind.startswith("gated"):
            is_packed = len(self.gates) == 1
            names = "up, gate" if self.is_gate_last else "gate, up"
            packed = f"{names} = {layers[0]}(x).chunk(2); " if is_packed else ""
            hidden = f"{activation}(gate){square} * up" if is_packed else f"{hidden} * {layers[1]}(x)"
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
        match = Match(Chain(block, last))
        value = match.before_last_layer(Place(expression, last), passing) if is_block else Place(expression, last)
        matched = match.gated(value, gate_at) if is_gated else match.hidden(value)
        if matched is not None and match.activation is not None:
            x, layers = matched
            first = match.chain.first_if_sound(expression, [x, *match.read])
            if first is not None:
                layers += (match.down,) if match.down is not None else ()
                before = [] if first == last else reads_before(block.statements[last], expression)
                reads = _known_reads(match.chain, [*reads_of(match.options), *before])
                activation = match.activation, match.is_tanh_form, match.is_squared
                found = *activation, (*match.between,), match.dropout, match.chunk
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
