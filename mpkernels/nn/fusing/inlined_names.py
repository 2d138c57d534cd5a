"""Reads statements of a block as one expression: finds the assignment of a name, and other uses of the name."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple


def dotted(node: ast.AST) -> str:
    """Return ``a.b.c`` for a dotted name, "" for other expressions."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (before := dotted(node.value)):
        return f"{before}.{node.attr}"
    return ""


def short(node: ast.AST) -> str:
    """Return a dotted name without ``self.`` or the modules before a function."""
    return dotted(node).partition(".")[2].removeprefix("nn.functional.").removeprefix("functional.") or dotted(node)


@dataclass(frozen=True)
class Suite:
    """Statements that run one after the other in a function."""

    function: ast.FunctionDef
    statements: list[ast.stmt]
    is_repeated: bool = False  #: whether a loop repeats them
    is_guarded: bool = False  #: whether errors may be caught around them, so that names are read even after a return

    def and_inner(self) -> Iterator["Suite"]:
        yield self
        for statement in self.statements:
            if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            is_repeated = self.is_repeated or isinstance(statement, ast.For | ast.While | ast.AsyncFor)
            is_guarded = self.is_guarded or _may_catch(statement)
            parts = [statement, *getattr(statement, "handlers", ()), *getattr(statement, "cases", ())]
            for inner in (getattr(part, name, None) for part in parts for name in ("body", "orelse", "finalbody")):
                if inner:
                    yield from Suite(self.function, inner, is_repeated, is_guarded).and_inner()


@dataclass(frozen=True)
class Place:
    """An expression as it is evaluated by the statement with this index."""

    node: ast.expr
    index: int


class Half(NamedTuple):
    """One part of ``packed.chunk(2, dim=-1)``."""

    call: ast.Call
    which: object
    packed: Place
    function: ast.expr | None  #: ``torch.chunk``, if it is called instead of the tensor's method


@dataclass
class Chain:
    """Follows names in one statement of a block back to the assignments that made them."""

    block: Suite
    last: int
    used: set[int] = field(default_factory=set)

    def is_own(self, node: ast.AST) -> bool:
        """Return whether this is ``self.a`` or ``self.a.b``."""
        arguments = self.block.function.args.args
        return bool(arguments) and dotted(node).startswith(f"{arguments[0].arg}.")

    def is_global(self, node: ast.AST) -> bool:
        """Return whether this is a dotted name whose first part is no local variable."""
        name = dotted(node).partition(".")[0]
        return bool(name) and name not in _locals(self.block.function)

    def follow(self, value: Place | None) -> Place | None:
        """Return the expression that a name stands for, if a simple assignment of the block made it."""
        while value is not None and isinstance(value.node, ast.Name):
            name, statements = value.node.id, self.block.statements
            at = next((at for at in reversed(range(value.index)) if name in bound_in(statements[at])), -1)
            made = _assigned(statements[at], name) if at >= 0 else None
            if made is None:
                return value
            self.used.add(at)
            value = Place(made, at)
        return value

    def half(self, value: Place | None) -> Half | None:
        """Return the parts of an expression that takes one half of a ``chunk`` into two. None for others."""
        match self.follow(value):
            case Place(ast.Subscript(halves, ast.Constant(which)), index):
                value = self.follow(Place(halves, index))
            case _:
                return None
        match value:
            case Place(ast.Call(ast.Attribute(packed, "chunk") as function, arguments) as call, index):
                is_torchs = self.is_global(packed) and bool(arguments)
            case _:
                return None
        tensor, *arguments = arguments if is_torchs else (packed, *arguments)
        if [ast.unparse(it) for it in (*arguments, *call.keywords)] not in (["2", "-1"], ["2", "dim=-1"]):
            return None
        return Half(call, which, Place(tensor, index), function if is_torchs else None)

    def first_if_sound(self, expression: ast.expr, read: list[Place]) -> int | None:
        """Return the index of the chain's first statement. Return None if other statements lie in between, if a name
        that the chain binds is used elsewhere, or if a name that it reads is bound again on the way."""
        first = min(self.used, default=self.last)
        if self.used != set(range(first, self.last)):
            return None
        statements = self.block.statements
        for place in read:
            bound_on_the_way = set().union(*map(bound_in, statements[first : place.index]))
            if bound_on_the_way & {node.id for node in ast.walk(place.node) if isinstance(node, ast.Name)}:
                return None
        made = set().union(*map(bound_in, statements[first : self.last]))
        return None if any(name in made for name in self._loaded_elsewhere(expression, first)) else first

    def _loaded_elsewhere(self, expression: ast.expr, first: int) -> Iterator[str]:
        """Yield the names that are read elsewhere, where they may still have a value from the chain."""
        window = self.block.statements[first : self.last + 1]
        inside = {id(node) for statement in window for node in ast.walk(statement)}
        last = window[-1]
        matched = {id(node) for node in ast.walk(expression)}
        yield from (name for node, name in loads(last) if id(node) not in matched)
        if isinstance(last, ast.AugAssign):
            yield from bound_in(last)
        ends = isinstance(last, ast.Return) and not self.block.is_guarded
        overwritten = set() if self.block.is_guarded else bound_in(last)
        for node, name in loads(self.block.function):
            is_after = self.block.is_repeated or (node.lineno, node.col_offset) > (last.lineno, last.col_offset)
            if id(node) not in inside and name not in overwritten and is_after and not ends:
                yield name
        for scope in inner_scopes(self.block.function):
            yield from (name for _, name in loads(scope))


_LATER = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.GeneratorExp)


def inner_scopes(function: ast.FunctionDef) -> list[ast.AST]:
    """Return the function's inner functions and generators: they read its names when they run, not where they stand."""
    return [it for it in ast.walk(function) if isinstance(it, _LATER) and it is not function]


def _may_catch(statement: ast.stmt) -> bool:
    """Return whether the statement may catch an error. Context managers of torch let all errors pass."""
    if isinstance(statement, ast.With):
        calls = [it.context_expr for it in statement.items]
        return not all(isinstance(call, ast.Call) and dotted(call.func).startswith("torch.") for call in calls)
    return isinstance(statement, ast.AsyncWith | ast.Try | getattr(ast, "TryStar", ast.Try))


def _assigned(statement: ast.stmt, name: str) -> ast.expr | None:
    """Return the expression that a simple assignment gives to the name: ``pair[0]`` to a in ``a, b = pair``."""
    match statement:
        case ast.Assign([ast.Name(made)], value) | ast.AnnAssign(ast.Name(made), _, value) if made == name:
            return value
        case ast.Assign([ast.Tuple([one, other])], pair) if (dotted(one) == name) != (dotted(other) == name):
            return ast.Subscript(pair, ast.Constant(int(dotted(other) == name)), ast.Load())
    return None


def bound_in(statement: ast.AST) -> set[str]:
    """Return the names that a statement may bind."""
    names = set()
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names.add(node.id)
        for part in ("name", "asname", "rest"):  # of functions, classes, imports, caught errors and patterns
            if isinstance(name := getattr(node, part, None), str):
                names.add(name.partition(".")[0])
    return names


def _locals(function: ast.FunctionDef) -> set[str]:
    arguments = {it.arg for it in ast.walk(function.args) if isinstance(it, ast.arg)}
    return arguments.union(*map(bound_in, function.body))


def loads(tree: ast.AST) -> Iterator[tuple[ast.Name, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Store):
            yield node, node.id
