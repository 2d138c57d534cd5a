"""Converts a model's weights to 16 bits, and back."""

from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize
from torch.nn.utils.spectral_norm import SpectralNorm

from mpkernels._shared.call_model import refuse_no_model
from mpkernels._shared.dtypes import dtype_of
from mpkernels._shared.parameters import named_in, params_of, unwrapped
from mpkernels._torch_private.modules import SpectralParametrization, pre_hooks_of
from mpkernels.amp.mixed_class import Mixed, mixed_class, own_forward_of
from mpkernels.ops.step.split import split
from mpkernels.optim import masters, param_state
from mpkernels.optim.engine import Engine

_NORMS = (
    *(nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.SyncBatchNorm),
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)
_WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule", "OptimizedModule")
_DTYPES = (torch.bfloat16, torch.float16)

Model = TypeVar("Model", bound=nn.Module)


def to_mixed(
    model: Model,
    dtype: torch.dtype | str = torch.bfloat16,
    keep_fp32: Iterable[str] = (),
    optimizer: torch.optim.Optimizer | None = None,
) -> Model:
    """Round the model's parameters to 16 bits, in place, and run its forward under autocast. Return the model.

    An optimizer of ``mpkernels.optim`` over its parameters then holds their fp32 masters. Not rounded are:

    * the parameters of norms: torch's own, and modules with "norm" in their class's name whose parameters are vectors;
    * the weights of nn.Bilinear, weights under spectral_norm, and weights shared with a module that stays fp32;
    * buffers.

    Autocast still computes with the unrounded parameters as with any fp32 weight.

    Convert the model before you compile it or wrap it in DDP. FSDP refuses a mixture of two dtypes. A forward that is
    set on the model later (``model.forward = ...``) runs under autocast as well. Methods other than forward, and the
    loss, need their own autocast.

    Args:
        model: the model to convert. Its parameters must be fp32, or ``dtype`` already.
        dtype: ``torch.bfloat16``, or ``torch.float16``, which needs a GradScaler; or the name of one.
        keep_fp32: names of further modules and parameters that stay fp32, as in ``named_modules`` and
            ``named_parameters``; ``*`` matches anything.
        optimizer: the model's optimizer of ``mpkernels.optim``, if it exists already; Accelerate, Lightning or Fabric
            may have wrapped it. It then keeps the unrounded weights as masters, bit for bit. Pass it if it has stepped.
            An optimizer that you make after the conversion starts from the rounded weights.
    """
    refuse_no_model("to_mixed", model)
    dtype = dtype_of(dtype)
    if dtype not in _DTYPES:
        raise ValueError(f"to_mixed: dtype must be torch.bfloat16 or torch.float16, got {dtype!r}")
    _refuse_wrapped("to_mixed", model, "convert it before")
    if any(isinstance(module, Mixed) for module in model.modules()):
        raise ValueError("to_mixed: model must not be converted yet, got one from to_mixed; to_full undoes that")
    if "forward" in vars(model) or isinstance(model, torch.jit.ScriptModule | torch.fx.GraphModule):
        raise ValueError("to_mixed: model must have its class's forward, got one that was replaced, scripted or traced")
    kept = _kept(model, keep_fp32)
    goals = [(name, param, torch.float32 if param in kept else dtype) for name, param in model.named_parameters()]
    for name, param, goal in goals:
        _check(name, param, goal, dtype)
    engine = None if optimizer is None else _checked("to_mixed", optimizer)
    if engine is not None and set(params_of(engine)).isdisjoint(model.parameters()):
        raise ValueError("to_mixed: optimizer must hold parameters of the model, got one that holds none of them")
    with torch.no_grad():
        for _, param, goal in goals:
            _set(param, param.to(goal) if engine is None else _with_master(param, goal, engine))
    if engine is not None:
        engine._start_afresh()
    kind: Any = type(model)
    model.__class__ = mixed_class(kind, dtype)  # type: ignore[assignment]
    return model


def to_full(model: Model, optimizer: torch.optim.Optimizer) -> Model:
    """Undo ``to_mixed``: replace each parameter by its fp32 master, bit for bit, in place. Return the model.

    The optimizer, which may be wrapped as for ``to_mixed``, continues in fp32 with the same moments. A frozen parameter
    that the optimizer doesn't hold is converted from its 16-bit value. A model without 16-bit parameters, as
    ``Policy("fp32")`` leaves it, is returned unchanged.
    """
    refuse_no_model("to_full", model)
    _refuse_wrapped("to_full", model, "pass the model inside DDP or torch.compile")
    if not isinstance(model, Mixed):
        if not any(map(masters.needs_master, model.parameters())):
            return model
        raise ValueError(f"to_full: model must come from to_mixed, got {type(model).__name__}")
    optimizer = _checked("to_full", optimizer)
    narrow = {name: param for name, param in model.named_parameters() if masters.needs_master(param)}
    params = set(params_of(optimizer))
    for name, param in narrow.items():
        if param.requires_grad and param not in params:
            raise ValueError(f"to_full: optimizer must hold the master of {name}, which is not among its parameters")
    with torch.no_grad():
        if optimizer._is_loaded:
            optimizer._compare_loaded()
        for param in narrow.values():
            state = optimizer.state.get(param, {})
            masters.drop_unfit(state, param)
            _set(param, masters.true_weight(param, state).float())
            for key in masters.KEYS.values():
                state.pop(key, None)
    optimizer._start_afresh()
    own_forward = own_forward_of(model)
    model.__class__ = model._mixed_class
    if own_forward is not None:
        model.forward = own_forward
    return model


def _checked(op: str, optimizer: torch.optim.Optimizer) -> Engine:
    optimizer = unwrapped(optimizer)
    if not isinstance(optimizer, Engine):
        kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
        raise TypeError(f"{op}: optimizer must be AdamW, Adam, SGD, Lion or Muon of mpkernels.optim, got {kind}")
    if optimizer._release is not None and optimizer._release._hooks:
        raise ValueError(f"{op}: optimizer must not release grads; call remove() on what release_grads() returned")
    return optimizer


def _refuse_wrapped(op: str, model: nn.Module, remedy: str) -> None:
    for module in model.modules():
        for kind in type(module).__mro__:
            if kind.__name__ in _WRAPPERS and kind.__module__.startswith("torch"):
                raise ValueError(f"{op}: model must not be wrapped or compiled, got {kind.__name__}; {remedy}")


def _kept(model: nn.Module, names: str | Iterable[str]) -> set[Tensor]:
    kept = named_in("to_mixed", "keep_fp32", model, names)
    for module in model.modules():
        kept.update(module.parameters(recurse=False) if _is_fp32s(module) else _spectral_of(module))
    return kept


def _spectral_of(module: nn.Module) -> list[Tensor]:
    """Return the weights under spectral_norm, which multiplies them with fp32 vectors of its own."""
    is_parametrized = isinstance(module, parametrize.ParametrizationList)
    if is_parametrized and any(isinstance(child, SpectralParametrization) for child in module.children()):
        return list(module.parameters(recurse=False))
    return [getattr(module, f"{it.name}_orig") for it in pre_hooks_of(module) if isinstance(it, SpectralNorm)]


def _is_fp32s(module: nn.Module) -> bool:
    """Return whether a module's parameters stay fp32: those of norms and of Bilinear, which autocast has no rule for. A
    linear layer that normalises its weight may have "norm" in its class's name, too, but it holds a matrix."""
    if isinstance(module, (*_NORMS, nn.Bilinear)):
        return True
    return "norm" in type(module).__name__.lower() and all(
        param.dim() <= 1 for param in module.parameters(recurse=False)
    )


def _check(name: str, param: Tensor, goal: torch.dtype, dtype: torch.dtype) -> None:
    if is_lazy(param):
        raise ValueError(f"to_mixed: {name} must be initialised, got a lazy parameter; run a forward first")
    if param.dtype not in (torch.float32, dtype):
        raise ValueError(f"to_mixed: {name} must be torch.float32 or {dtype}, got {param.dtype}")
    if not param.is_meta and bool((param.isfinite() & ~param.to(goal).isfinite()).any()):
        raise ValueError(f"to_mixed: {name} must fit {goal}, got {param.detach().abs().max().item():g}")


def _set(param: Tensor, value: Tensor) -> None:
    """Change the parameter's data as Module.to does: it stays the same object, for tied modules and its optimizer."""
    if value.dtype == param.dtype:
        return
    grad = param.grad
    param.grad = None
    param.data = value
    if grad is not None:
        param.grad = grad.to(value.dtype)


def _with_master(param: Tensor, goal: torch.dtype, optimizer: Engine) -> Tensor:
    """Return the rounded weight, and put its master into the optimizer's state."""
    group = next((group for group in optimizer.param_groups if any(it is param for it in group["params"])), None)
    if group is None or goal == torch.float32 or param.dtype != torch.float32:
        return param.to(goal)
    known, scheme = optimizer.state[param], group["master"]
    master = masters.before_rounding(param, goal, known) if optimizer._is_loaded else param.detach()
    rounded, remainder = split(master, goal)
    state = param_state.create(optimizer._rule, rounded, group)
    masters.drop_unfit(known, param)
    state.update(known)
    state[masters.KEYS[scheme]] = remainder if scheme == "split" else master
    masters.mark(state, goal)
    optimizer.state[param] = state
    return rounded if scheme == "split" else master.to(goal)
