"""Rewrites a function with fused calls at chosen sites, and leaves everything else as it is."""

import __future__

import ast
import inspect
import linecache
import warnings
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from functools import lru_cache
from operator import is_
from types import CellType, CodeType, FunctionType
from typing import Any

from mpkernels.nn.fusing import calls, choices, sequential
from mpkernels.nn.fusing.loops import Loop
from mpkernels.nn.fusing.sites import Site, find_sites

# names of modules and methods of ours in a rewritten function
OURS = {"mpkernels_calls": calls, "mpkernels_choices": choices, "mpkernels_loops": sequential}
CALLS, CHOICES, LOOPS = OURS
METHOD, KIND, VALUE = "mpkernels_method", "mpkernels_kind", "mpkernels_value"  # what was rewritten


class NotRewritableError(Exception):
    """Says why a function is left alone."""


@lru_cache(maxsize=1024)
def sites_of(function: FunctionType) -> list[Site | Loop]:
    """Return all candidates in the function's source. Raise NotRewritableError if other code runs."""
    return find_sites(_parse(function))


def rewrite(function: FunctionType, chosen: Sequence[tuple[Any, ...]], method: Any) -> FunctionType:
    """Return the function with fused calls at the sites with these indexes and texts, and at runs of a loop's modules.
    Globals, defaults and line numbers stay. If somebody replaces the plain class's method, the function calls that."""
    tree = _parse(function)
    sites = dict(enumerate(find_sites(tree)))
    fused_sites, owner = list[tuple[str, Site]](), tree.args.args[0].arg
    for index, text, *runs in chosen:
        site, name = sites.get(index), f"{method.name} {index}"
        if isinstance(site, Loop) and site.text == text and runs:
            _replace_loop(name, site, owner, *runs)
        elif isinstance(site, Site) and site.text == text and site.reads is not None:
            fused_sites.append((name, site))
        else:
            raise NotRewritableError("has changed since it was fused")  # pickled with an older source
    for name, site in sorted(fused_sites, key=lambda entry: entry[1].first, reverse=True):
        _replace(name, site, owner)
    call = f"{CALLS}.by_replacement({METHOD}, locals())"
    is_generator = bool(function.__code__.co_flags & inspect.CO_GENERATOR)
    result = f"(yield from {call})" if is_generator else call
    detour = f"if {KIND}.{method.name} is not {VALUE}: return {result}"
    tree.body.insert(0, _parsed(detour, tree.body[0]))
    code = _compile(function, tree)
    values = OURS | {METHOD: method, KIND: method.kind, VALUE: method.value}
    cells = tuple(CellType(values[name]) for name in code.co_freevars)
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
def _file(text: str) -> dict[tuple[str, int], tuple[ast.FunctionDef, CodeType]]:
    """Return the syntax tree and the code of a file's functions, by name and first line."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python has given the file's warnings already
        tree = ast.parse(text)
        codes = {(it.co_name, it.co_firstlineno): it for it in _codes_in(compile(tree, "", "exec", dont_inherit=True))}
    functions = [it for it in ast.walk(tree) if isinstance(it, ast.FunctionDef)]
    keys = [(it.name, min([it.lineno, *(each.lineno for each in it.decorator_list)])) for it in functions]
    return {key: (it, codes[key]) for key, it in zip(keys, functions, strict=True) if key in codes}


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes_in(constant)


def _parse(function: FunctionType) -> ast.FunctionDef:
    """Return the function's syntax tree."""
    code = function.__code__
    try:
        functions = _file("".join(linecache.getlines(code.co_filename, function.__globals__)))
        node, compiled = functions[code.co_name, code.co_firstlineno]
    except (SyntaxError, KeyError):
        raise NotRewritableError("has no source") from None
    if not _is_same(compiled, code):
        raise NotRewritableError("runs other code than its source says")
    return deepcopy(node)


def _is_same(one: Any, other: Any) -> bool:
    """Return whether both code objects or constants are the same. Code of other files and lines may be."""
    if not isinstance(one, CodeType) or not isinstance(other, CodeType):
        return type(one) is type(other) and bool(one == other)
    parts = ("co_code", "co_names", "co_varnames", "co_cellvars", "co_freevars")
    are_same = len(one.co_consts) == len(other.co_consts) and all(map(_is_same, one.co_consts, other.co_consts))
    return are_same and all(getattr(one, part) == getattr(other, part) for part in parts)


def _compile(function: FunctionType, node: ast.FunctionDef) -> CodeType:
    """Compile inside a class of the same name, because names like ``self.__private`` need it, and inside a function
    that has our modules as arguments, so that no new global is needed."""
    names = function.__qualname__.split(".")
    is_method = len(names) > 1 and names[-2].isidentifier()
    name = names[-2] if is_method else "Outer"
    tree = ast.parse(f"class {name}:\n def outer({', '.join((*OURS, METHOD, KIND, VALUE))}): pass")
    tree.body[0].body[0].body = [node]  # type: ignore[attr-defined]
    futures = function.__code__.co_flags & __future__.annotations.compiler_flag
    code: Any = compile(ast.fix_missing_locations(tree), function.__code__.co_filename, "exec", futures, True)
    for inner in (name, "outer", node.name):
        code = next(it for it in code.co_consts if isinstance(it, CodeType) and it.co_name == inner)
    found: CodeType = code
    return found


def _replace_loop(name: str, loop: Loop, owner: str, runs: Sequence[Sequence[Any]]) -> None:
    """Put before the loop: if the modules are in a plain list, fused ops compute runs of them that are plain, unless
    torch is known to compute all of them."""
    modules, value, plain = ast.unparse(loop.modules), loop.value, tuple(map(tuple, runs))
    test = f"{CHOICES}.verdict({owner}, {name!r}, {value}) is not False and {LOOPS}.is_plain_list({modules})"
    text = f"if {test}: {value} = {LOOPS}.run_all({owner}, {name!r}, {modules}, {plain!r}, {value})"
    choice = _parsed(text, loop.statement.body[0])
    choice.orelse = [loop.statement]
    loop.block.statements[loop.block.statements.index(loop.statement)] = choice


def _replace(name: str, site: Site, owner: str) -> None:
    """Put the fused call beside the plain lines. What the plain lines evaluate before x, and x, get names, so that both
    can read them."""
    statements, lines = site.block.statements, site.block.statements[site.first : site.last + 1]
    head = site.head
    names = {id(node): f"{CALLS}_{at}" for at, node in enumerate(head)}
    loads = {id(node): ast.Name(names[id(node)], ast.Load()) for node in head}
    test, fused = (_parsed(text, site.expression).value for text in _texts(name, site, owner, names))
    if head:  # a tuple that isn't empty is true
        stored = [ast.NamedExpr(ast.Name(names[id(node)], ast.Store()), node) for node in head]
        test = ast.BoolOp(ast.And(), [ast.Tuple([*stored], ast.Load()), test])
    if site.first == site.last:
        choice = ast.IfExp(test, fused, _substituted(site.expression, loads))
        written = [_substituted(lines[0], {id(site.expression): ast.copy_location(choice, site.expression)})]
    else:
        whole = ast.If(test, [_substituted(lines[-1], {id(site.expression): fused})], _substituted(lines, loads))
        written = [ast.copy_location(whole, lines[0])]
    if head and not isinstance(lines[-1], ast.Return):
        written.append(_parsed(f"{names[id(head[-1])]} = None", lines[-1]))  # it may be large
    statements[site.first : site.last + 1] = written


def _texts(name: str, site: Site, owner: str, names: Mapping[int, str]) -> tuple[str, str]:
    """Return the source of the test whether the site is plain and ours, and of the fused call. ``owner`` names the
    module, mostly ``self``. ``names``: node's id -> the name to read instead."""

    def text(*nodes: ast.expr) -> str:
        return "".join(f"{names.get(id(node)) or ast.unparse(node)}, " for node in nodes)

    activation = "'gelu_tanh', " if site.is_tanh_form else "'relu2', " if site.is_squared else text(site.activation)
    shared = f"{text(site.x)} ({text(*site.layers)}), {activation} ({text(*site.between)})"
    verdict = f"{CHOICES}_verdict"
    known = f"({verdict} := {CHOICES}.verdict({owner}, {name!r}, {text(site.x)[:-2]}))"
    tests = [f"{known} is not False", f"{CALLS}.are_plain({shared})"]
    if site.is_tanh_form:
        tests.append(f"{ast.unparse(site.activation)} is {CALLS}.GELU")
    if site.is_squared:
        tests.append(f"{CALLS}.is_relu_to_square({text(site.activation)})")
    if site.gates:
        tests.append(f"{CALLS}.are_gates(({text(*site.gates)}), {text(site.chunk) if site.chunk else ''})")
    if operands := [it.node for it in site.reads or () if it.is_operand]:
        tests.append(f"{CALLS}.are_ordinary({text(*operands)})")
    dropout = text(site.dropout.p, site.dropout.training) if site.dropout else ""
    call = f"{site.kind!r}, {shared}, {dropout} is_gate_last={site.is_gate_last}"
    tests.append(f"({verdict} or {CHOICES}.is_ours({owner}, {name!r}, {call}))")
    return " and ".join(tests), f"{CALLS}.fused({call})"


def _parsed(text: str, place: ast.AST) -> Any:
    """Parse a statement. It gets the line numbers of ``place``."""
    [statement] = ast.parse(text).body
    for node in ast.walk(statement):
        ast.copy_location(node, place)
    return statement


def _substituted(tree: Any, others: Mapping[int, ast.AST]) -> Any:
    """Return the tree with some nodes, which are given by their ids, replaced by others. Copy only what changes."""
    if id(tree) in others:
        return others[id(tree)]
    if isinstance(tree, list):
        parts = [_substituted(it, others) for it in tree]
        return tree if all(map(is_, parts, tree)) else parts
    if not isinstance(tree, ast.AST):
        return tree
    fields = {name: _substituted(it, others) for name, it in ast.iter_fields(tree)}
    is_same = all(fields[name] is it for name, it in ast.iter_fields(tree))
    return tree if is_same else ast.copy_location(type(tree)(**fields), tree)
