"""Decides for one module which sites a fused op computes, and says why the others are left."""

import ast
import builtins
import inspect
from collections.abc import Iterator, Sequence
from functools import reduce
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch.nn import Module, ModuleDict, ModuleList
from torch.nn.utils import parametrize

from mpkernels._torch_private.modules import books_of
from mpkernels.nn.fusing import calls, choices, sequential
from mpkernels.nn.fusing.classes import Recipe, innermost
from mpkernels.nn.fusing.inlined_names import dotted, short
from mpkernels.nn.fusing.loops import Loop
from mpkernels.nn.fusing.originals import DROPOUT, GELU, TORCH_CHUNK
from mpkernels.nn.fusing.recognise import (
    is_activation,
    is_layer,
    is_linear,
    known_activation,
    names_in,
    uses_activation,
    why_not,
)
from mpkernels.nn.fusing.rewrite import NotRewritableError, sites_of
from mpkernels.nn.fusing.safe_lookup import UNSEEN, attribute_of, has_plain_attributes, own_values
from mpkernels.nn.fusing.sites import Site, partition

_NO_SITE = "its forward applies no activation to the output of a linear layer in a form that fuse knows"
_STACKED = "it stacks the weights of several layers, such as experts, in one tensor, and mpkernels has no op for these"


class Decision(NamedTuple):
    recipe: Recipe
    fused: list[tuple[str, str]]  #: (the site's text, the op that computes it)
    left: list[tuple[str, str]]  #: (the site's text, why it is left)
    covered: Sequence[Module] = ()  #: projections that their caller's MLP computes: they aren't fused by themselves


def decide(module: Module, kind: type) -> Decision:
    """Decide for a module. ``kind`` is its class, or the plain class of a fused module."""
    has_forward = "forward" in vars(module) or inspect.getattr_static(kind, "forward") is not Module.forward
    has_layers = any(is_layer(it) for it in module.modules() if it is not module) or _holds_both(module)
    if not (has_forward and has_layers):  # a ModuleList has no forward: its loop stands in the module that holds it
        return Decision((), [], [])
    try:
        _refuse_foreign_forward(module, kind)
        decision = _by_source(module, kind)
    except NotRewritableError as error:
        decision = Decision((), [], [(_holds_both(module), f"its forward {error}")])
    if not (decision.recipe or decision.left):
        own = books_of(own_values(module))[0].values()
        stacks = any(it is not None and it.ndim == 3 and len(it) > 1 for it in own)
        decision = decision._replace(left=[(_holds_both(module), _STACKED if stacks else _NO_SITE)])
    return decision._replace(left=[(text, reason) for text, reason in decision.left if text])


def _refuse_foreign_forward(module: Module, kind: type) -> None:
    if isinstance(module, torch.jit.ScriptModule | torch.fx.GraphModule):
        raise NotRewritableError("was generated")
    if "forward" in vars(module):
        raise NotRewritableError("was replaced on this instance")
    if not has_plain_attributes(kind):
        raise NotRewritableError("reads attributes by code of its class's own")
    if parametrize.is_parametrized(module) and type(module) is kind:  # and it wasn't fused before
        raise NotRewritableError("reads parametrized tensors of its own")


def _by_runs(modules: list[Module]) -> Decision:
    """Decide for modules that are called one after another. The recipe is the chosen runs."""
    runs = sequential.runs_of(modules)
    chosen, left = partition(runs, [run.why_left(modules) for run in runs])
    fused = [(runs[index].text(modules), runs[index].computed_by(modules)) for index in chosen]
    recipe = tuple(runs[index] for index in chosen)
    covered = [it for run in recipe for it in run.projection(modules)]
    return Decision(recipe, fused, [(runs[index].text(modules), reason) for index, reason in left], covered)


def _by_source(module: Module, kind: type) -> Decision:
    recipe, fused, left, covered = [], [], [], list[Module]()
    for name, function, found in _methods_in_reach(kind):
        sites = {index: it for index, it in enumerate(found) if isinstance(it, Site)}
        verdicts = [_why_left(site, module, function) for site in sites.values()]
        chosen, others = partition([*sites.values()], verdicts)
        entries: list[tuple[Any, ...]] = [(index, sites[index].text) for index in chosen]
        fused += [(sites[index].text, _computed_by(sites[index], module, function)) for index in chosen]
        left += [(sites[index].text, reason) for index, reason in others]
        for index, loop in enumerate(found):
            modules = _resolve(loop.modules, module, function) if isinstance(loop, Loop) else None
            if isinstance(loop, Loop) and sequential.is_plain_list(modules):
                decision = _by_runs(sequential.modules_of(modules))
                entries += [(index, loop.text, decision.recipe)] if decision.recipe else []
                prefix = "" if modules is module else f"{loop.text}: "
                fused += [(prefix + text, computed_by) for text, computed_by in decision.fused]
                left += [(prefix + text, reason) for text, reason in decision.left]
                covered += decision.covered
        recipe += [(name, tuple(entries))] if entries else []
    return Decision(tuple(recipe), fused, left, covered)


def _methods_in_reach(kind: type) -> Iterator[tuple[str, FunctionType, list[Site | Loop]]]:
    """Yield forward and the methods that it may call, if they can be rewritten. Raise if forward can't."""
    names = ["forward"]
    for name in names:
        try:
            function = innermost(kind, name)
            sites = sites_of(function)
        except NotRewritableError:
            if name == "forward":
                raise
            continue
        yield name, function, sites
        methods = [it for it in names_in(function.__code__) if it not in names and not hasattr(Module, it)]
        names += [it for it in methods if isinstance(inspect.getattr_static(kind, it, None), FunctionType)]


def _why_left(site: Site, module: Module, function: FunctionType) -> str | None:
    """Return "" for a site that an op of ours can compute, the reason for one that it can't, and None for calls that
    are something else, such as a norm after a linear layer."""
    named = [
        [(short(called), _resolve(called, module, function)) for called in expressions]
        for expressions in (site.layers, [site.activation], site.between)
    ]
    layers, [activation], between = ([value for _, value in pairs] for pairs in named)
    if not is_activation(activation) or not all(map(is_layer, layers)):
        return None
    if any(is_activation(it) or is_layer(it) for it in between):
        return None
    if site.is_tanh_form and activation is not GELU:
        return None
    if site.is_squared and known_activation(activation) != "relu":
        return None
    if site.dropout is not None and _resolve(site.dropout.called, module, function) is not DROPOUT:
        return None
    if site.chunk is not None and _resolve(site.chunk, module, function) is not TORCH_CHUNK:
        return None
    gates = layers[: len(site.gates)]
    reason = why_not(*named) or site.why_left
    if gates and not reason and not calls.are_halves(gates):
        return f"{short(site.layers[0])} is not as wide as what it multiplies"
    attributes = [it.node for it in site.reads or () if isinstance(it.node, ast.Attribute)]
    runs_code = site.reads is None or any(_resolve(it, module, function) is UNSEEN for it in attributes)
    return reason or ("something else is evaluated between its calls" if runs_code else "")


def _resolve(expression: Any, module: Module, function: FunctionType) -> Any:
    """Return the value of a dotted name. UNSEEN if it has none, or if only running code would tell."""
    first, *names = dotted(expression).split(".")
    local = {function.__code__.co_varnames[0]: module} if function.__code__.co_argcount else {}
    value = local.get(first, function.__globals__.get(first, vars(builtins).get(first, UNSEEN)))
    return reduce(attribute_of, names, value)


def _computed_by(site: Site, module: Module, function: FunctionType) -> str:
    activation, *layers = (_resolve(it, module, function) for it in (site.activation, *site.layers))
    name = "gelu_tanh" if site.is_tanh_form else "relu2" if site.is_squared else known_activation(activation)
    return f"{site.kind}, {name}{choices.note_on(site.kind, layers, activation, name)}"


def _holds_both(module: Module) -> str:
    """Return the class's name if the module, with its lists and dicts, has an activation and a matrix to multiply."""
    if isinstance(module, torch.jit.ScriptModule):  # which doesn't tell its activations
        return module.original_name if any(map(is_linear, module.children())) else ""
    attributes = own_values(module)
    parameters, _, children = books_of(attributes)
    lists = [child for child in children.values() if type(child) in (ModuleList, ModuleDict)]
    listed = [inner for modules in lists for inner in sequential.modules_of(modules)]
    has_matrix = any(map(is_linear, (*children.values(), *attributes.values(), *listed)))
    has_matrix = has_matrix or any(param is not None and param.ndim > 1 for param in parameters.values())
    return type(module).__name__ if has_matrix and (uses_activation(module) or any(map(is_activation, listed))) else ""
