"""An optimizer's options beyond torch's, and their checks: those for all parameters, and those of a parameter group."""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from mpkernels._shared.dtypes import dtype_of
from mpkernels._shared.parameters import refuse_sparse, refuse_unserved
from mpkernels.distributed.parts import parts_of
from mpkernels.optim.masters import KEYS, needs_master

GROUP_OPTIONS = ("master", "state_dtype")
_OPTIMIZER_OPTIONS = ("max_norm", "guard", "process_group", "offload")
_NUMBERS = ("lr", "momentum", "dampening", "weight_decay", "eps", "ns_steps")
_STATE_DTYPES = (torch.float32, torch.bfloat16, torch.int8)


def check_max_norm(name: str, max_norm: float | None) -> None:
    if not (max_norm is None or isinstance(max_norm, Real | Tensor)) or isinstance(max_norm, bool):
        raise TypeError(f"{name}: max_norm must be a number above 0 or None, got {max_norm!r}")
    if max_norm is not None and not max_norm > 0:
        raise ValueError(f"{name}: max_norm must be above 0, got {max_norm}; None turns clipping off")


def offload_of(name: str, offload: bool | str) -> bool | str:
    """Return the option without its other name for True."""
    if offload == "stream" and not torch.cuda.is_available():
        raise RuntimeError(f"{name}: offload='stream' needs a GPU, got a machine without one; leave it out")
    if not isinstance(offload, bool) and offload not in ("cpu", "stream"):
        raise TypeError(f"{name}: offload must be True, False, 'cpu' or 'stream', got {offload!r}")
    return True if offload == "cpu" else offload


def check_global(name: str, max_norm: float | None, guard: bool | None) -> None:
    check_max_norm(name, max_norm)
    if not isinstance(guard, bool | None):
        raise TypeError(f"{name}: guard must be True, False or None, got {guard!r}")
    if max_norm is not None and guard is False:
        raise ValueError(f"{name}: max_norm needs the guard: a non-finite norm would clip every grad to NaN")


def check_numbers(name: str, options: Mapping[str, Any]) -> None:
    """Raise if a hyperparameter is no number."""
    numbers = {key: options[key] for key in _NUMBERS if key in options}
    if "betas" in options:
        try:
            numbers["betas[0]"], numbers["betas[1]"] = options["betas"]
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name}: betas must be two numbers, got {options['betas']!r}") from None
    numbers |= {f"ns_coefficients[{i}]": it for i, it in enumerate(options.get("ns_coefficients") or ())}
    for key, value in numbers.items():
        if not hasattr(value, "__float__"):
            raise TypeError(f"{name}: {key} must be a number, got {value!r}")


def check_numbers_of(optimizer: Any, group: Mapping[str, Any]) -> None:
    if torch.compiler.is_compiling():
        return
    known = group.keys() & optimizer.defaults.keys()  # a user may keep something else under another's name
    check_numbers(type(optimizer).__name__, {key: group[key] for key in known})


def name_cause(optimizer: Any, params: Sequence[Tensor], error: Exception) -> None:
    """Raise an error that names what has made a step fail, if that is a hyperparameter, a grad or a parameter."""
    name = type(optimizer).__name__
    for group in optimizer.param_groups:
        check_numbers_of(optimizer, group)
    for param in params:
        refuse_sparse(name, param.grad)
    if isinstance(error, NotImplementedError):
        refuse_unserved(name, "params", params)


def refuse_twice(name: str, params: Sequence[Tensor]) -> None:
    """Raise if a parameter comes twice: torch would step it twice, each implementation with other results."""
    if len(set(map(id, params))) == len(params) or torch.compiler.is_compiling():
        return
    places: dict[int, int] = {}
    for i, param in enumerate(params):
        if (first := places.setdefault(id(param), i)) != i:
            shape = tuple(param.shape)
            raise ValueError(f"{name}: params[{i}] of shape {shape} must be given once, got it as params[{first}], too")


def refuse_quantised(name: str, params: Sequence[Tensor]) -> None:
    """Raise for TransformerEngine's quantised weights: each step would round its result to 8 bits."""
    for i, part in enumerate(() if torch.compiler.is_compiling() else parts_of(params)):
        if type(part).__module__.startswith("transformer_engine"):
            raise TypeError(
                f"{name}: params[{i}] must be in 16 or 32 bits, got TransformerEngine's {type(part).__name__}, which "
                "rounds each step's result to 8 bits or fewer; make the model without quantized_model_init and "
                "fp8_model_init, or train it by TransformerEngine's FusedAdam(master_weights=True)"
            )


def complete(optimizer: Any, group: dict[str, Any]) -> None:
    """Fill in the optimizer's value for each of our options that the group doesn't set."""
    for key in GROUP_OPTIONS:
        group.setdefault(key, getattr(optimizer, key))
    group["state_dtype"] = dtype_of(group["state_dtype"])
    group.setdefault("maximize", False)  # torch's classes do so in older checkpoints; those of Lion's authors lack it


def leave_scaling_to_torch(optimizer: Any) -> None:
    """With differentiable=True, have scalers unscale the grads themselves: torch's step refuses a scale."""
    if optimizer.defaults.get("differentiable"):
        optimizer._step_supports_amp_scaling = optimizer._takes_scale = False


def check_group(optimizer: Any, group: dict[str, Any]) -> None:
    name = type(optimizer).__name__
    for key in _OPTIMIZER_OPTIONS:  # ZeroRedundancyOptimizer repeats these in each group
        if key in group and group[key] != getattr(optimizer, key, None):
            raise ValueError(f"{name}: {key} must be given to the optimizer, for all parameters, got it in a group")
    ours = *GROUP_OPTIONS, *_OPTIMIZER_OPTIONS
    for key in group.keys() - optimizer.defaults.keys() - {"params", "param_names", *ours}:
        if like := get_close_matches(str(key).lower(), ours, cutoff=0.8):
            raise ValueError(f"{name}: a group has no option {key!r}; did you mean {like[0]!r}?")
    check_numbers_of(optimizer, group)
    refuse_quantised(name, group["params"])
    if group["master"] not in KEYS:
        raise ValueError(f"{name}: master must be 'split' or 'fp32', got {group['master']!r}")
    if group["state_dtype"] not in _STATE_DTYPES:
        got = group["state_dtype"]
        raise ValueError(f"{name}: state_dtype must be torch.float32, torch.bfloat16 or torch.int8, got {got!r}")
    if isinstance(optimizer, torch.optim.AdamW) and not group.get("decoupled_weight_decay", True):
        raise ValueError(f"{name}: a group must have decoupled_weight_decay=True, got False, which is Adam's")
    if optimizer.defaults.get("differentiable"):
        _check_differentiable(optimizer, group)


def _check_differentiable(optimizer: Any, group: dict[str, Any]) -> None:
    name = type(optimizer).__name__
    if any(map(needs_master, group["params"])):
        raise ValueError(f"{name}: differentiable=True takes fp32 parameters alone, got 16-bit ones")
    if optimizer.max_norm is not None or optimizer.guard or group["state_dtype"] != torch.float32:
        raise ValueError(f"{name}: differentiable=True is torch's own step, without max_norm, guard and state_dtype")
    if optimizer._peers is not None or optimizer.offload:
        raise ValueError(f"{name}: differentiable=True is torch's own step, without process_group and offload")
