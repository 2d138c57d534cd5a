"""Rewrites a function with fused calls at chosen sites, and leaves everything else as it is."""

import __future__

import ast
import inspect
import linecache
from collections.abc import Sequence
from copy import deepcopy
from functools import lru_cache
from types import CellType, CodeType, FunctionType
from typing import Any

from mpkernels.nn.fusing import calls, sequential
from mpkernels.nn.fusing.loops import Loop
from mpkernels.nn.fusing.sites import Site, find_sites

# names of modules and methods of ours in a rewritten function
CALLS, METHOD, LOOPS = "mpkernels_calls", "mpkernels_method", "mpkernels_loops"


class NotRewritableError(Exception):
    """Says why a function is left alone."""


@lru_cache(maxsize=1024)
def sites_of(function: FunctionType) -> list[Site | Loop]:
    """Return all candidates in the function's source. Raise NotRewritableError if other code runs."""
    return find_sites(_parse(function)[0])


def rewrite(function: FunctionType, chosen: Sequence[tuple[Any, ...]], method: Any) -> FunctionType:
    """Return the function with fused calls at the sites with these indexes and texts, and at runs of a loop's modules.
    Globals, defaults and line numbers stay. If somebody replaces the plain class's method, the function calls that."""
    tree, imports = _parse(function)
    sites = dict(enumerate(find_sites(tree)))
    fused_sites = []
    for index, text, *runs in chosen:
        site = sites.get(index)
        if isinstance(site, Loop) and site.text == text and runs:
            _replace_loop(site, *runs)
        elif isinstance(site, Site) and site.text == text and site.reads is not None:
            fused_sites.append(site)
        else:
            raise NotRewritableError("has changed since it was fused")  # pickled with an older source
    for site in sorted(fused_sites, key=lambda site: site.first, reverse=True):
        _replace(site)
    tree.body.insert(0, _detour(tree, bool(function.__code__.co_flags & inspect.CO_GENERATOR)))
    code = _compile(function, tree, imports)
    cells = tuple(CellType({CALLS: calls, METHOD: method, LOOPS: sequential}[name]) for name in code.co_freevars)
    written = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, cells)
    return dressed_as(function, written)


def dressed_as(known: FunctionType, function: FunctionType) -> FunctionType:
    """Give the function the names and docs of ``known``, and the same attribute dict: counters count in both."""
    lazy = "__annotate__" if hasattr(known, "__annotate__") else "__annotations__"
    for name in ("__name__", "__kwdefaults__", "__qualname__", "__module__", "__doc__", lazy):
        setattr(function, name, getattr(known, name))
    function.__dict__ = vars(known)
    return function


@lru_cache(maxsize=16)
def _file(text: str) -> tuple[list[ast.stmt], dict[tuple[str, int], ast.FunctionDef]]:
    """Return a file's imports and its functions, by name and first line."""
    tree = ast.parse(text)
    functions = [it for it in ast.walk(tree) if isinstance(it, ast.FunctionDef)]
    first_lines = [min(it.lineno, *(each.lineno for each in it.decorator_list), it.lineno) for it in functions]
    return _imports(tree.body), {(it.name, line): it for it, line in zip(functions, first_lines, strict=True)}


def _imports(statements: list[ast.stmt]) -> list[ast.stmt]:
    """Return the imports that bind names of the module, also those within if and try."""
    found: list[ast.stmt] = []
    for statement in statements:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            found += [statement] if getattr(statement, "module", "") != "__future__" else []
        elif not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            parts = [statement, *getattr(statement, "handlers", ())]
            for inner in (getattr(part, name, []) for part in parts for name in ("body", "orelse", "finalbody")):
                found += _imports(inner)
    return found


def _parse(function: FunctionType) -> tuple[ast.FunctionDef, list[ast.stmt]]:
    """Return the function's syntax tree and its file's imports, which decide how Python 3.11 compiles calls."""
    code = function.__code__
    try:
        imports, functions = _file("".join(linecache.getlines(code.co_filename, function.__globals__)))
    except SyntaxError:
        raise NotRewritableError("has no source") from None
    node = deepcopy(functions.get((code.co_name, code.co_firstlineno)))
    if node is None:
        raise NotRewritableError("has no source")
    if not _is_same(_compile(function, node, imports), code):
        raise NotRewritableError("runs other code than its source says")
    return node, imports


def _compile(function: FunctionType, node: ast.FunctionDef, imports: list[ast.stmt]) -> CodeType:
    """Compile inside a class of the same name, because names like ``self.__private`` need it, and inside a function
    that has our modules as arguments, so that no new global is needed."""
    names = function.__qualname__.split(".")
    is_method = len(names) > 1 and names[-2].isidentifier()
    name = names[-2] if is_method else "Outer"
    tree = ast.parse(f"class {name}:\n def outer({CALLS}, {METHOD}, {LOOPS}): pass")
    tree.body[0].body[0].body = [node]  # type: ignore[attr-defined]
    tree.body = [*imports, *tree.body]
    futures = function.__code__.co_flags & __future__.annotations.compiler_flag
    code: Any = compile(ast.fix_missing_locations(tree), function.__code__.co_filename, "exec", futures, True)
    for inner in (name, "outer", node.name):
        code = next(it for it in code.co_consts if isinstance(it, CodeType) and it.co_name == inner)
    found: CodeType = code
    return found


def _is_same(one: CodeType, other: CodeType) -> bool:
    """Return whether both code objects compute the same. Their files and lines may differ."""
    parts = ("co_code", "co_names", "co_varnames", "co_cellvars", "co_freevars")
    if [getattr(one, part) for part in parts] != [getattr(other, part) for part in parts]:
        return False
    return len(one.co_consts) == len(other.co_consts) and all(map(_is_same_constant, one.co_consts, other.co_consts))


def _is_same_constant(one: Any, other: Any) -> bool:
    if isinstance(one, CodeType) and isinstance(other, CodeType):
        return _is_same(one, other)
    if isinstance(one, str) and "<locals>" in one:  # the qualified name of an inner function, in Python 3.10
        return isinstance(other, str) and one.split(".")[-1] == other.split(".")[-1]
    return type(one) is type(other) and bool(one == other)


def _detour(function: ast.FunctionDef, is_generator: bool) -> ast.stmt:
    """Return a statement that, if the method was replaced, calls the new one with the same arguments."""
    args = function.args
    positional = [it.arg for it in args.args] + [f"*{it.arg}" for it in (args.vararg,) if it]
    named = [f"{it.arg!r}: {it.arg}" for it in args.kwonlyargs] + [f"**{it.arg}" for it in (args.kwarg,) if it]
    arguments = f"({''.join(f'{it}, ' for it in positional)}), {{{', '.join(named)}}}"
    call = f"{CALLS}.by_replacement({METHOD}, {arguments})"
    text = f"if {CALLS}.is_replaced({METHOD}): return {f'(yield from {call})' if is_generator else call}"
    detour = ast.parse(text).body[0]
    for node in ast.walk(detour):
        ast.copy_location(node, function.body[0])
    return detour


def _replace_loop(loop: Loop, runs: Sequence[Sequence[Any]]) -> None:
    """Put before the loop: if the modules are in a plain list, fused ops compute runs of them that are plain."""
    modules, value, plain = ast.unparse(loop.modules), loop.value, tuple(map(tuple, runs))
    choice: Any = ast.parse(
        f"if {LOOPS}.is_plain_list({modules}): {value} = {LOOPS}.run_all({modules}, {plain!r}, {value})"
    ).body[0]
    for node in ast.walk(choice):
        ast.copy_location(node, loop.statement.body[0])
    choice.orelse = [loop.statement]
    loop.block.statements[loop.block.statements.index(loop.statement)] = choice


def _replace(site: Site) -> None:
    statements, last = site.block.statements, site.block.statements[site.last]
    held = _hold(site)
    setattr(site.expression, _MARK, True)
    if site.first == site.last:
        fused, test = _fused(site), _test(site, held)
        choice = ast.copy_location(ast.IfExp(test, fused, _Named().visit(site.expression)), site.expression)
        written: list[ast.stmt] = [_Insert(choice).visit(last)]
    else:
        fused_last = _Insert(_fused(site)).visit(deepcopy(last))
        test, lines = _test(site, held), statements[site.first : site.last + 1]
        written = [ast.copy_location(ast.If(test, [fused_last], [_Named().visit(it) for it in lines]), lines[0])]
    if held and not isinstance(last, ast.Return):
        written.append(ast.copy_location(ast.Assign([_name(held[-1], ast.Store())], ast.Constant(None)), last))
    statements[site.first : site.last + 1] = written
    delattr(site.expression, _MARK)


_MARK = "is_replaced_by_mpkernels"
_NAME = "is_named_by_mpkernels"


class _Insert(ast.NodeTransformer):
    """Puts a node in the place of the marked one."""

    def __init__(self, node: ast.expr) -> None:
        self.node = node

    def visit(self, node: ast.AST) -> Any:
        return self.node if hasattr(node, _MARK) else super().visit(node)


class _Named(ast.NodeTransformer):
    """Puts a name in the place of each expression that ``_hold`` has marked with one."""

    def visit(self, node: ast.AST) -> Any:
        return _name(node, ast.Load()) if hasattr(node, _NAME) else super().visit(node)


def _hold(site: Site) -> list[ast.expr]:
    """Mark the expressions of a site's head with names, so that the plain lines don't evaluate them again."""
    for at, node in enumerate(site.head):
        setattr(node, _NAME, f"{CALLS}_{at}")
    return site.head


def _name(held: ast.AST, context: ast.expr_context) -> ast.Name:
    return ast.copy_location(ast.Name(getattr(held, _NAME), context), held)


def _test(site: Site, held: list[ast.expr]) -> ast.expr:
    layers, _ = _shared(site)
    between = [ast.Tuple([*site.between], ast.Load())] if site.between else []
    parts = [_call("are_plain", [site.x, layers, site.activation, *between], site)]
    if site.is_tanh_form:
        parts.append(_call("is_gelu", [site.activation], site))
    if site.gates:
        gates = ast.Tuple(list(site.gates), ast.Load())
        parts.append(_call("are_gates", [gates, *([] if site.chunk is None else [site.chunk])], site))
    if operands := [it.node for it in site.reads or () if it.is_operand]:
        parts.append(_call("are_ordinary", operands, site))
    if held:  # a tuple that isn't empty is true
        named = [ast.NamedExpr(_name(it, ast.Store()), it) for it in held]
        parts.insert(0, ast.Tuple(list(named), ast.Load()))
    return ast.copy_location(ast.BoolOp(ast.And(), parts) if len(parts) > 1 else parts[0], site.expression)


def _fused(site: Site) -> ast.expr:
    options: dict[str, ast.expr] = {}
    if site.is_gate_last:
        options["is_gate_last"] = ast.Constant(True)
    if site.between:
        options["between"] = ast.Tuple([*site.between], ast.Load())
    if site.dropout is not None:
        options |= {"dropout": site.dropout.p, "training": site.dropout.training}
    return _call("fused", [ast.Constant(site.kind), site.x, *_shared(site)], site, **options)


def _shared(site: Site) -> tuple[ast.expr, ast.expr]:
    activation = ast.Constant("gelu_tanh") if site.is_tanh_form else site.activation
    return ast.Tuple(list(site.layers), ast.Load()), activation


def _call(name: str, arguments: list[ast.expr], site: Site, **options: ast.expr) -> ast.expr:
    function = ast.Attribute(ast.Name(CALLS, ast.Load()), name, ast.Load())
    positional, named = ([_Named().visit(deepcopy(it)) for it in each] for each in (arguments, options.values()))
    keywords = [ast.keyword(*each) for each in zip(options, named, strict=True)]
    return ast.copy_location(ast.Call(function, positional, keywords), site.expression)
