"""Finds loops that call one module after another, in the function's syntax tree alone."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from mpkernels.nn.fusing.inlined_names import Suite, dotted, inner_scopes, loads, short


@dataclass(frozen=True)
class Loop:
    """``for layer in self.layers: x = layer(x)``."""

    block: Suite
    statement: ast.For
    modules: ast.expr
    value: str  #: the name of the value that goes through the modules, x here

    @property
    def text(self) -> str:
        return short(self.modules)


def find_loops(function: ast.FunctionDef) -> Iterator[Loop]:
    """Yield the loops over modules of ``self`` whose values in between nobody reads."""
    blocks = [*Suite(function, function.body).and_inner()]
    # A read of the loop's variable, other than the call in the loop itself, is one after the loop or in another loop.
    called = {id(it.body[0].value.func) for block in blocks for it in block.statements if _result(it)}  # type: ignore
    read = {name for node, name in loads(function) if id(node) not in called}
    read_later = {name for scope in inner_scopes(function) for _, name in loads(scope)}
    for block in blocks:
        for statement in block.statements:
            value = _result(statement)
            if not value or not isinstance(statement, ast.For) or not function.args.args:
                continue
            is_own = dotted(statement.iter).partition(".")[0] == function.args.args[0].arg  # ``self`` is a Sequential
            is_seen = block.is_guarded or value in read_later or ast.unparse(statement.target) in read
            if is_own and not is_seen:
                yield Loop(block, statement, statement.iter, value)


def _result(statement: ast.stmt) -> str:
    """Return "x" for ``for layer in ...: x = layer(x)``, "" for other statements."""
    if not isinstance(statement, ast.For) or statement.orelse or not isinstance(statement.target, ast.Name):
        return ""
    match statement.body:
        case [ast.Assign([ast.Name(made)], ast.Call(ast.Name(called), [ast.Name(taken)], []))]:
            return made if called == statement.target.id != made == taken else ""
    return ""
