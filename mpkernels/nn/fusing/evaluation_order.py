"""Finds what a statement evaluates before one of its expressions, and whether this only reads."""

import ast
from collections.abc import Iterator
from typing import NamedTuple

from mpkernels.nn.fusing.inlined_names import dotted


class Read(NamedTuple):
    """A name or an attribute that is read."""

    node: ast.expr
    is_operand: bool  #: whether an operator takes it, which only computes if this is a number or a plain tensor


def reads_before(statement: ast.stmt, expression: ast.expr) -> list[Read] | None:
    """Return all that the statement reads before it evaluates the expression. Return None if it may do more than read,
    or may skip the expression."""
    before = _before(statement.value, expression) if isinstance(statement, _WITH_VALUE) and statement.value else None
    if before is None:
        return None
    return reads_of([statement.target, *before] if isinstance(statement, ast.AugAssign) else before)


def reads_of(nodes: list[ast.expr]) -> list[Read] | None:
    """Return what these expressions read. Return None if they may do more."""
    found: list[Read] = []
    for node in nodes:
        reads = _reads_of(node, False)
        if reads is None:
            return None
        found += reads
    return found


_WITH_VALUE = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return, ast.Expr)
_OPERATIONS = (ast.BinOp, ast.UnaryOp, ast.Compare, ast.BoolOp, ast.IfExp)


def _reads_of(node: ast.expr, is_operand: bool) -> list[Read] | None:
    if isinstance(node, ast.Constant):
        return []
    if dotted(node):
        return [Read(node, is_operand)]
    if not isinstance(node, (ast.Tuple, ast.List, *_OPERATIONS)):
        return None
    inner = [_reads_of(it, isinstance(node, _OPERATIONS)) for it in _operands(node)]
    return None if None in inner else [read for reads in inner for read in reads or ()]


def _operands(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the expressions that the node evaluates itself, in their order."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.keyword):
            yield child.value
        elif isinstance(child, ast.expr) and not isinstance(getattr(child, "ctx", None), ast.Store | ast.Del):
            yield child


def _before(node: ast.expr, expression: ast.expr) -> list[ast.expr] | None:
    """Return the expressions in the node that are evaluated before this one. None if the node may skip this one."""
    if node is expression:
        return []
    operands = list(_operands(node))
    at = next(at for at, operand in enumerate(operands) if any(it is expression for it in ast.walk(operand)))
    certain = {ast.IfExp: 1, ast.BoolOp: 1, ast.Compare: 2}.get(type(node), len(operands))
    inner = _before(operands[at], expression)
    if inner is None or at >= certain:
        return None
    earlier = [it for it in operands if it is not operands[at]] if isinstance(node, ast.Dict) else operands[:at]
    return earlier + inner
