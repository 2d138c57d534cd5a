"""Finds what a statement evaluates before one of its expressions."""

import ast
from collections.abc import Iterator
from typing import NamedTuple


class Read(NamedTuple):
    """A name or an attribute that is read, or another expression, which may do more."""

    node: ast.expr
    is_operand: bool  #: whether an operator takes it, which only computes if this is a number or a plain tensor


def reads_before(statement: ast.stmt, expression: ast.expr) -> list[Read]:
    """Return all that the statement evaluates before the expression."""
    before = _before(statement.value, expression)  # type: ignore[attr-defined]
    return reads_of([statement.target, *before] if isinstance(statement, ast.AugAssign) else before)


def reads_of(nodes: list[ast.expr]) -> list[Read]:
    """Return what these expressions evaluate."""
    return [read for node in nodes for read in _reads_of(node, False)]


_OPERATIONS = (ast.BinOp, ast.UnaryOp, ast.Compare, ast.BoolOp, ast.IfExp)
_ANYTHING = ast.Call(ast.Name("anything", ast.Load()), [], [])


def _reads_of(node: ast.expr, is_operand: bool) -> Iterator[Read]:
    if isinstance(node, (ast.Tuple, ast.List, *_OPERATIONS)):
        for operand in _operands(node):
            yield from _reads_of(operand, isinstance(node, _OPERATIONS))
    elif not isinstance(node, ast.Constant):
        yield Read(node, is_operand)


def _operands(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the expressions that the node evaluates itself, in their order."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.keyword):
            yield child.value
        elif isinstance(child, ast.expr) and not isinstance(getattr(child, "ctx", None), ast.Store | ast.Del):
            yield child


def _before(node: ast.expr, expression: ast.expr) -> list[ast.expr]:
    """Return the expressions in the node that are evaluated before this one. Anything may be evaluated instead of one
    that the node may skip."""
    if node is expression:
        return []
    operands = list(_operands(node))
    at = next(at for at, operand in enumerate(operands) if any(it is expression for it in ast.walk(operand)))
    certain = {ast.IfExp: 1, ast.BoolOp: 1, ast.Compare: 2}.get(type(node), len(operands))
    earlier = [it for it in operands if it is not operands[at]] if isinstance(node, ast.Dict) else operands[:at]
    return [*earlier, *_before(operands[at], expression), *([_ANYTHING] if at >= certain else [])]
