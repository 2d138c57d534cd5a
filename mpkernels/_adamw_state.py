"""What AdamW remembers of a parameter: made when the first grad comes, or taken over from a checkpoint."""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mpkernels.ops.split import join, split

MASTERS = {"split": ("remainder", torch.int16), "fp32": ("master", torch.float32)}  # key in the state, dtype
MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
_ELSEWHERE = {"master_param": "master"}  # TransformerEngine's key -> ours

State = dict[str, Tensor]


def create(param: Tensor, master: str, state_dtype: torch.dtype, amsgrad: bool) -> State:
    """A state before the first step. The master is the parameter as it is, exactly."""
    state = {"step": torch.zeros((), dtype=torch.float32, device=param.device)}
    for key in MOMENTS[: 3 if amsgrad else 2]:
        state[key] = torch.zeros_like(
            param, dtype=moment_dtype(param, state_dtype), memory_format=torch.preserve_format
        )
    if needs_master(param):
        key, dtype = MASTERS[master]
        state[key] = torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)
        if master == "fp32":
            state[key].copy_(param)
    return state


def needs_master(param: Tensor) -> bool:
    return param.dtype in (torch.bfloat16, torch.float16)


def moment_dtype(param: Tensor, state_dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if param.dtype == torch.float64 else state_dtype


def adopt(
    param: Tensor, saved: Mapping[str, Any], group: Mapping[str, Any], master: str, state_dtype: torch.dtype
) -> State:
    """The state in a checkpoint of ours, torch's, Apex's or TransformerEngine's. Nothing is rounded, but moments to
    the dtype that was asked for."""
    saved = {_ELSEWHERE.get(key, key): value for key, value in saved.items()}
    state = create(param, master, state_dtype, amsgrad="max_exp_avg_sq" in saved)
    state["step"].fill_(float(saved.get("step", group.get("step", 0))))  # Apex counts once for the whole group
    for key in MOMENTS:
        if key in state and key in saved:
            state[key].copy_(saved[key])
    if needs_master(param):
        _adopt_master(param, saved, state, master)
    return state | {
        key: value for key, value in saved.items() if key not in state and key not in ("remainder", "master")
    }


def _adopt_master(param: Tensor, saved: Mapping[str, Any], state: State, master: str) -> None:
    found = {key: saved[key].to(param.device) for key, _ in MASTERS.values() if key in saved}
    wrong = [key for key, dtype in MASTERS.values() if key in found and found[key].dtype != dtype]
    if wrong:  # as torch's own load_state_dict leaves it, which casts states to the parameter's dtype
        warnings.warn(f"AdamW: {wrong[0]} came back as {found[wrong[0]].dtype}; rebuilt from the weight", stacklevel=4)
        return
    if not found:
        return
    weight = found["master"] if "master" in found else join(param, found["remainder"])
    if master == "fp32":
        state["master"].copy_(weight)
    else:
        # The checkpoint's master decides, also over a parameter that was rounded another way.
        rounded, remainder = split(weight, param.dtype)
        param.detach().copy_(rounded)
        state["remainder"].copy_(remainder)
