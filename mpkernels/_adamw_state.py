"""What AdamW remembers of a parameter: made when the first grad comes, or taken over from a checkpoint."""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mpkernels.ops import int8
from mpkernels.ops.split import join, split

MASTERS = {"split": ("remainder", torch.int16), "fp32": ("master", torch.float32)}  # key in the state, dtype
MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
_ELSEWHERE = {"master_param": "master"}  # TransformerEngine's key -> ours

State = dict[str, Tensor]


def create(param: Tensor, master: str, state_dtype: torch.dtype, amsgrad: bool) -> State:
    """A state before the first step. The master is the parameter as it is, exactly."""
    state = {"step": torch.zeros((), dtype=torch.float32, device=param.device)}
    keys, dtype = MOMENTS[: 3 if amsgrad else 2], _moment_dtype(param, state_dtype)
    for key in keys:
        state[key] = torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)
    if dtype == torch.int8:
        for key in keys:
            state[key].fill_(0 if key == "exp_avg" else -128)  # the codes of 0
        blocks = len(keys) * -(-param.numel() // int8.QUANTIZED)
        state["scales"] = torch.zeros(blocks, dtype=torch.float32, device=param.device)
    add_master(state, param, master)
    return state


def add_master(state: State, param: Tensor, master: str) -> None:
    """Where there is none, and should be: the parameter as it is, exactly."""
    if not needs_master(param) or any(key in state for key, _ in MASTERS.values()):
        return
    key, dtype = MASTERS[master]
    state[key] = torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)
    if master == "fp32":
        state[key].copy_(param)


def needs_master(param: Tensor) -> bool:
    return param.dtype in (torch.bfloat16, torch.float16)


def _moment_dtype(param: Tensor, state_dtype: torch.dtype) -> torch.dtype:
    return param.dtype if param.dtype == torch.float64 or param.is_complex() else state_dtype


def plain(state: State) -> State:
    """The state with its moments as numbers that torch knows."""
    if "scales" not in state:
        return state
    keys = [key for key in MOMENTS if key in state]
    scales = state["scales"].view(len(keys), -1)
    moments = {key: int8.decode(state[key], scales[k], squared=k > 0) for k, key in enumerate(keys)}
    return {key: value for key, value in (state | moments).items() if key != "scales"}


@torch.no_grad()
def adopt(
    param: Tensor, saved: Mapping[str, Any], group: Mapping[str, Any], master: str, state_dtype: torch.dtype
) -> State:
    """The state in a checkpoint of ours, torch's, Apex's or TransformerEngine's. Nothing is rounded, but moments to
    the dtype that was asked for."""
    saved = plain({_ELSEWHERE.get(key, key): value for key, value in saved.items()})
    state = create(param, master, state_dtype, amsgrad="max_exp_avg_sq" in saved)
    state["step"].fill_(float(saved.get("step", group.get("step", 0))))  # Apex counts once for the whole group
    for k, key in enumerate(key for key in MOMENTS if key in state):
        if "scales" in state:
            values = torch.empty_like(state[key], dtype=torch.float32).copy_(saved[key])
            codes, scales = int8.encode(values, squared=k > 0)
            state[key].copy_(codes)
            state["scales"].view(sum(key in state for key in MOMENTS), -1)[k] = scales
        else:
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
