"""Decide for one module which sites a fused op computes, and say why the others are left."""

import ast
import builtins
import inspect
from collections.abc import Iterator
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch.nn import Module
from torch.nn.utils import parametrize

from mpkernels._torch_private.modules import books_of
from mpkernels.nn.fusing import calls, sequential
from mpkernels.nn.fusing.chain import dotted, short
from mpkernels.nn.fusing.decorators import innermost, redecorated, unless_replaced
from mpkernels.nn.fusing.looking import UNSEEN, has_plain_attributes, own_values, value_of
from mpkernels.nn.fusing.originals import DROPOUT, GELU, SEQUENTIAL_FORWARD, SEQUENTIAL_ITER, TORCH_CHUNK
from mpkernels.nn.fusing.recognise import (
    is_activation,
    is_linear,
    known_activation,
    why_never,
    why_no_activation,
    why_no_dropout,
)
from mpkernels.nn.fusing.rewrite import NotRewritableError, rewrite, sites_of
from mpkernels.nn.fusing.sites import Site, partition

Plan = tuple[Any, ...]
"""For each method, its name and its chosen sites: index and text. For a Sequential, the chosen runs of its modules."""

Methods = tuple[Any, ...]
"""What a plan was made of. Somebody may give the class others."""


class Decision(NamedTuple):
    plan: Plan
    fused: list[tuple[str, str]]  #: what stands there, and what computes it
    left: list[tuple[str, str]]  #: what stands there, and why it is left


def methods_of(kind: type, plan: Plan) -> dict[str, Any]:
    """Return the plan's methods, written anew, in the form that a class body has them."""
    if _is_sequential(kind):
        return {"forward": sequential.forward_of(plan, kind)}
    return {name: _method(kind, name, chosen) for name, chosen in plan}


def methods_now(kind: type, plan: Plan) -> Methods:
    """Return the plan's methods as the class has them, under all decorators."""
    names = ("forward", "__iter__") if isinstance(plan[0], sequential.Run) else [name for name, _ in plan]
    return tuple(inspect.getattr_static(kind, name, None) for name in names)


def _method(kind: type, name: str, chosen: Any) -> FunctionType:
    written = innermost(kind, name)
    method = calls.Method(kind, name, getattr(kind, name), written)
    rewritten = rewrite(written, chosen, method)
    decorated = redecorated(kind, name, rewritten)
    return rewritten if decorated is rewritten else unless_replaced(method, decorated)


def decide(module: Module, kind: type) -> Decision:
    """Decide for a module whose class is ``kind``, but for fused ones."""
    if not (any(is_linear(it) for it in module.modules() if it is not module) or _holds_both(module)):
        return Decision((), [], [])
    try:
        _refuse_foreign_forward(module, kind)
        decision = _sequential(module) if _is_sequential(kind) else _by_source(module, kind)
    except NotRewritableError as error:
        decision = Decision((), [], [(_holds_both(module), f"its forward {error}")])
    if not (decision.plan or decision.left):
        reason = "its forward applies no activation to the output of a linear layer"
        decision = decision._replace(left=[(_holds_both(module), reason)])
    return decision._replace(left=[(text, reason) for text, reason in decision.left if text])


def _is_sequential(kind: type) -> bool:
    forward, iterate = (inspect.getattr_static(kind, name, None) for name in ("forward", "__iter__"))
    return forward is SEQUENTIAL_FORWARD and iterate is SEQUENTIAL_ITER


def _refuse_foreign_forward(module: Module, kind: type) -> None:
    if "forward" in vars(module):
        raise NotRewritableError("was replaced on this instance")
    if isinstance(module, torch.jit.ScriptModule | torch.fx.GraphModule):
        raise NotRewritableError("was generated")
    if not has_plain_attributes(kind):
        raise NotRewritableError("reads attributes by code of its class's own")
    if parametrize.is_parametrized(module) and type(module) is kind:  # and it wasn't fused before
        raise NotRewritableError("reads parametrized tensors of its own")


def _sequential(module: Module) -> Decision:
    modules = sequential.modules_of(module)
    runs = sequential.runs_of(modules)
    chosen, left = partition(runs, [run.why_left(modules) for run in runs])
    fused = [(runs[index].text(modules), runs[index].computed_by(modules)) for index in chosen]
    plan = tuple(runs[index] for index in chosen)
    return Decision(plan, fused, [(runs[index].text(modules), reason) for index, reason in left])


def _by_source(module: Module, kind: type) -> Decision:
    decision = Decision((), [], [])
    for name, function, sites in _methods_in_reach(kind):
        chosen, left = partition(sites, [_why_left(site, module, function) for site in sites])
        decision = Decision(
            (*decision.plan, (name, tuple((index, sites[index].text) for index in chosen)))
            if chosen
            else decision.plan,
            decision.fused + [(sites[index].text, _computed_by(sites[index], module, function)) for index in chosen],
            decision.left + [(sites[index].text, reason) for index, reason in left],
        )
    return decision


def _methods_in_reach(kind: type) -> Iterator[tuple[str, FunctionType, list[Site]]]:
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
        methods = [it for it in function.__code__.co_names if it not in names and not hasattr(Module, it)]
        names += [it for it in methods if isinstance(inspect.getattr_static(kind, it, None), FunctionType)]


def _why_left(site: Site, module: Module, function: FunctionType) -> str | None:
    """Return "" for a site that an op of ours can compute, the reason for one that it can't, and None for calls that
    are something else, such as a norm after a linear layer."""
    activation, dropout = _resolve(site.activation, module, function), None
    layers = [_resolve(it, module, function) for it in site.layers]
    if not is_activation(activation) or not all(map(is_linear, layers)):
        return None
    reasons = [(site.layers[at], why_never(layer)) for at, layer in enumerate(layers)]
    reasons.append((site.activation, why_no_activation(activation)))
    if site.is_tanh_form and activation is not GELU:
        return None
    if site.dropout is not None:
        dropout = _resolve(site.dropout.called, module, function)
        if site.dropout.is_module:
            reasons.append((site.dropout.called, why_no_dropout(dropout)))
        elif dropout is not DROPOUT:
            return None
    if site.chunk is not None and _resolve(site.chunk, module, function) is not TORCH_CHUNK:
        return None
    reason = next((f"{short(role)} {why}" for role, why in reasons if why is not None), "")
    gates = layers[: len(site.gates)]
    if gates and not reason and not calls.are_halves(gates):
        return f"{short(site.layers[0])} is not as wide as what it multiplies"
    return reason or ("" if _only_reads(site, module, function) else "something else is evaluated between its calls")


def _only_reads(site: Site, module: Module, function: FunctionType) -> bool:
    """Return whether nothing happens between the calls but that names and attributes are read, by nobody's code."""
    if site.reads is None:
        return False
    attributes = [it.node for it in site.reads if isinstance(it.node, ast.Attribute)]
    return all(_resolve(it, module, function) is not UNSEEN for it in attributes)


def _resolve(expression: Any, module: Module, function: FunctionType) -> Any:
    """Return the value of a dotted name, UNSEEN where it has none, or only code would tell."""
    first, *names = dotted(expression).split(".")
    known = {function.__code__.co_varnames[0]: module} if function.__code__.co_argcount else {}
    return value_of(known.get(first, function.__globals__.get(first, vars(builtins).get(first, UNSEEN))), names)


def _computed_by(site: Site, module: Module, function: FunctionType) -> str:
    name = "gelu_tanh" if site.is_tanh_form else known_activation(_resolve(site.activation, module, function))
    return f"{site.kind}, {name}"


def _holds_both(module: Module) -> str:
    """Return the class's name if the module itself holds an activation and a matrix to multiply with."""
    own = own_values(module)
    parameters, _, children = books_of(own)
    held = [*children.values(), *own.values()]
    has_matrix = any(map(is_linear, held)) or any(it is not None and it.ndim > 1 for it in parameters.values())
    return type(module).__name__ if has_matrix and any(map(is_activation, held)) else ""
