"""The fp32 weights of 16-bit parameters: how optimizers make, save and load them. If somebody has written to a weight,
the kernels notice and go on from the written value (csrc/step/split.h)."""

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from mpkernels._shared.parameters import is_sharded
from mpkernels.distributed.parts import part_of, parts_in, placed_as
from mpkernels.ops.step.split import join, split

KEYS = {"split": "remainder", "fp32": "master"}  # scheme -> key in a parameter's state
_NARROW = (torch.bfloat16, torch.float16)

State = dict[str, Tensor]


def needs_master(param: Tensor) -> bool:
    return param.dtype in _NARROW


def unfit(param: Tensor, state: State) -> list[str]:
    """Return the keys of masters that aren't this parameter's any more, because the model was converted to fp32 or
    fp64, or to the other 16-bit dtype, whose remainders mean something else. Then the model's weights win."""
    if not needs_master(param):
        return [key for key in KEYS.values() if key in state]
    remainder = state.get("remainder")
    if remainder is None or getattr(remainder, "made_for", remainder.dtype) in (torch.int16, param.dtype):
        return []  # a plain int16 has lost its mark, because a user has moved it, say
    return ["remainder"]


def drop_unfit(state: State, param: Tensor) -> None:
    for key in unfit(param, state):
        del state[key]


def mark(state: State, dtype: torch.dtype) -> None:
    """Note on a remainder which 16-bit dtype it completes: the remainder's bits don't tell."""
    if "remainder" in state:
        state["remainder"].made_for = dtype  # type: ignore[attr-defined]


def give(state: State, param: Tensor, scheme: str) -> None:
    """Put the parameter's master into its state, in the form of the scheme. The master comes from a loaded checkpoint
    if the state holds one; otherwise its value is the parameter's, exactly."""
    if not needs_master(param):
        return
    if "remainder" in state and state["remainder"].dtype != torch.int16:
        # A checkpoint's form, where a loader such as ZeRO's has put it into the state itself.
        state["remainder"] = placed_as(param, part_of(state["remainder"]).view(torch.int16))
        mark(state, param.dtype)
    if KEYS[scheme] in state:
        return
    kept = parts_in({key: state.pop(key) for key in KEYS.values() if key in state})
    part = part_of(param.detach())
    weight = true_weight(part, kept)
    if scheme == "fp32":
        master = torch.empty_like(part, dtype=torch.float32).copy_(weight)
    else:
        master = torch.zeros_like(part, dtype=torch.int16)
        if kept:
            weight, remainder = split(weight, part.dtype)
            master.copy_(remainder)
    state[KEYS[scheme]] = placed_as(param, master)
    mark(state, param.dtype)
    if kept:
        part.copy_(weight)  # changes weights on ties, which the schemes round differently


def saved_as(param: Tensor, remainder: Tensor) -> Tensor:
    """Return a remainder's bits in its parameter's dtype: collectives refuse int16, and loaders cast to that dtype."""
    return placed_as(param, part_of(remainder).view(param.dtype))  # type: ignore[no-any-return]


def saved_in_fp32(param: Tensor, state: State) -> State:
    """Return the state with the master in place of its remainder, if it has one."""
    if "remainder" not in state:
        return state
    part, remainder = part_of(param.detach()), part_of(state["remainder"])  # which offload keeps on the host
    master = placed_as(param, join(part.to(remainder.device), remainder))
    return {key: value for key, value in state.items() if key != "remainder"} | {"master": master}


def loaded(name: str, param: Tensor, saved: Mapping[str, Any]) -> State:
    """Return the master in a saved state, unchanged, placed as the parameter is. ``give`` converts it to the
    optimizer's scheme at the first step: that needs the weight, and the model may be loaded, and converted to 16 bits,
    after the optimizer. A parameter that is still fp32 then drops it (``drop_unfit``)."""
    key = next((key for key in ("master", "remainder") if key in saved), None)
    if key is None:
        return {}
    part = part_of(param.detach())
    found = saved[key].to(part.device)
    made_for = param.dtype if needs_master(param) else found.dtype
    if key == "remainder" and found.dtype == made_for and made_for in _NARROW:
        found = found.view(torch.int16)
    dtype = torch.float32 if key == "master" else torch.int16
    if found.dtype != dtype:  # torch's own load_state_dict casts states to the parameter's dtype
        warnings.warn(
            f"{name}: {key} came back as {found.dtype}, not as one of {param.dtype}'s; rebuilt from the weight",
            stacklevel=4,
        )
        return {}
    state = {key: placed_as(param, torch.empty_like(part, dtype=dtype).copy_(found))}
    mark(state, made_for)
    return state


def true_weight(param: Tensor, state: State) -> Tensor:
    """Return a parameter's fp32 weight. Elements whose master doesn't round to the parameter were written to since; for
    them, return the parameter's value. A parameter without a master, or in another dtype, is returned unchanged."""
    weight = param.detach()
    if is_sharded(weight):
        return placed_as(weight, true_weight(part_of(weight), parts_in(state)))  # type: ignore[no-any-return]
    if not needs_master(weight) or unfit(param, state):
        return weight
    if "remainder" in state:
        remainder = state["remainder"].to(weight.device)  # offload=True keeps states on the host
        return join(weight, remainder.view(torch.int16))  # a loader may have left a checkpoint's form
    if "master" not in state:
        return weight
    master = state["master"].to(weight.device)
    rounds_to_it = (weight == master.to(weight.dtype)) | (weight == split(master, weight.dtype)[0])
    return torch.where(rounds_to_it, master, weight)


def before_rounding(param: Tensor, dtype: torch.dtype, state: State) -> Tensor:
    """Return the master of an fp32 parameter that is about to be rounded to ``dtype``: the state's, which was loaded,
    where the parameter is its rounded value; elsewhere the parameter."""
    weight, rounded = param.detach(), param.detach().to(dtype)
    drop_unfit(state, rounded)
    return torch.where(rounded == weight, true_weight(rounded, state), weight)


@torch.no_grad()
def align(weights: Iterable[tuple[Tensor, State]]) -> list[Tensor]:
    """Update each fp32 copy in these states where somebody has written to its weight. Return for each copy whether it
    has changed."""
    changed = []
    for param, state in weights:
        if needs_master(param) and "master" in state:
            part, master = part_of(param.detach()), part_of(state["master"])
            new = true_weight(part, {"master": master})
            changed.append(~((new == master) | (new.isnan() & master.isnan())).all())
            master.copy_(new)
            rounded = new.to(part.dtype)
            # They differ on ties, where a split master was loaded. Else the weight isn't written: a backward that
            # steps parameters may still need it, and refuses a weight with another version.
            if part.is_meta or not torch.equal(rounded, part):
                part.copy_(rounded)
    return changed


def compare_loaded(name: str, weights: Iterable[tuple[Tensor, State]]) -> None:
    """Align the masters with the weights before the first step after a load, and warn if they differed."""
    if changed := sum(map(bool, align(weights))):
        warnings.warn(
            f"{name}: {changed} parameters are not the weights that the loaded masters were made for; the weights "
            "win. Load the model's checkpoint that belongs to the optimizer's.",
            stacklevel=2,
        )
