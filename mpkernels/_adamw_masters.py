"""The fp32 weights of 16-bit parameters: how AdamW makes and keeps them, and follows what others write to a weight."""

import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from mpkernels.ops.split import join, split

KEYS = {"split": "remainder", "fp32": "master"}  # scheme -> key in a parameter's state

State = dict[str, Tensor]
States = Mapping[Tensor, State]


def needs_master(param: Tensor) -> bool:
    return param.dtype in (torch.bfloat16, torch.float16)


def give(state: State, param: Tensor, scheme: str) -> None:
    """Keep the parameter's master as the scheme has it: made of the master that a checkpoint has left in the state, or,
    where there is none, of the parameter as it is, exactly."""
    if not needs_master(param):  # it may have been 16-bit
        for key in KEYS.values():
            state.pop(key, None)
        return
    if (
        "remainder" in state
    ):  # as a checkpoint has it, where a loader has put that into the state itself, as ZeRO's does
        state["remainder"] = state["remainder"].view(torch.int16)
    if KEYS[scheme] in state:
        return
    if scheme == "fp32":
        remainder = state.pop("remainder", None)
        weight = param.detach() if remainder is None else join(param.detach(), remainder)
        state["master"] = torch.empty_like(param, dtype=torch.float32).copy_(weight)
    else:
        state["remainder"] = torch.zeros_like(param, dtype=torch.int16)
        if (master := state.pop("master", None)) is not None:
            rounded, remainder = split(master, param.dtype)
            param.detach().copy_(rounded)  # another weight on ties alone
            state["remainder"].copy_(remainder)


def saved_as(param: Tensor, remainder: Tensor) -> Tensor:
    """Return a remainder's bits in its parameter's dtype: collectives refuse int16, and loaders cast to that dtype."""
    return remainder.view(param.dtype)


def saved_in_fp32(param: Tensor, state: State) -> State:
    """Return the state with the master in place of its remainder, if it has one."""
    if "remainder" not in state:
        return state
    master = join(param.detach(), state["remainder"])
    return {key: value for key, value in state.items() if key != "remainder"} | {"master": master}


def loaded(param: Tensor, saved: Mapping[str, Any]) -> State:
    """Return the master in a saved state. ``give`` turns it into what the optimizer keeps once the weight it belongs to
    is known to be there, at the first step: the model may be loaded after the optimizer."""
    key = next((key for key in ("master", "remainder") if key in saved), None)
    if key is None or not needs_master(param):
        return {}
    found = saved[key].to(param.device)
    if key == "remainder" and found.dtype == param.dtype:
        found = found.view(torch.int16)
    dtype = torch.float32 if key == "master" else torch.int16
    if found.dtype != dtype:  # as torch's own load_state_dict leaves it, which casts states to the parameter's dtype
        warnings.warn(f"AdamW: {key} came back as {found.dtype}; rebuilt from the weight", stacklevel=4)
        return {}
    return {key: torch.empty_like(param, dtype=dtype).copy_(found)}


def aligned(param: Tensor, master: Tensor) -> Tensor:
    """Return the master where it rounds to the parameter, as either scheme rounds, and the parameter elsewhere."""
    rounds_to_param = (param == master.to(param.dtype)) | (param == split(master, param.dtype)[0])
    return torch.where(rounds_to_param, master, param)


class Followed:
    """Knows the weights whose fp32 masters are up to date, by their version. Whoever writes to a weight writes to its
    master; a write through ``.data`` raises no version and is seen at the first step after a load alone."""

    def __init__(self, after_load: bool = False) -> None:
        self.is_settled = False  # whether a step has taken up every master since it was made or loaded
        self._versions: dict[Tensor, int] = {}
        self._warns = after_load

    @classmethod
    def after_step(cls, params: Iterable[Tensor], states: States) -> "Followed":
        """Take all masters for up to date."""
        followed = cls()
        followed.is_settled = True
        followed.note(params, states)
        return followed

    def note(self, params: Iterable[Tensor], states: States) -> None:
        """Take the masters of these parameters for up to date: a step has written both."""
        self._versions |= {param: param._version for param, _ in _copied(params, states)}

    @torch.no_grad()
    def hand_on(self, params: Iterable[Tensor], states: States) -> None:
        """Write to the masters what was written to the weights since the last step."""
        self._align(item for item in _copied(params, states) if item[0] in self._versions)

    def settle(self, params: Iterable[Tensor], states: States) -> None:
        """Do the same before a step, and compare masters that no step has written yet with their weights, which win."""
        if torch.compiler.is_compiling():  # a graph sees no versions
            for param, master in _copied(params, states):
                master.copy_(aligned(param.detach(), master))
            return
        changed = self._align(_copied(params, states))
        if changed and self._warns:
            self._warns = False
            warnings.warn(
                f"AdamW: {changed} parameters are not the weights that the loaded masters were made for; the weights "
                "win. Load the model's checkpoint that belongs to the optimizer's.",
                stacklevel=2,
            )

    def _align(self, copied: Iterable[tuple[Tensor, Tensor]]) -> int:
        """Write to each master that may be out of date. Return how many have changed; 0 where no warning is due."""
        changed = 0
        for param, master in copied:
            if self._versions.get(param) == param._version:
                continue
            new = aligned(param.detach(), master)
            if self._warns and not _is_captured(param):
                changed += not bool(((new == master) | (new.isnan() & master.isnan())).all())
            master.copy_(new)
            if param in self._versions:
                self._versions[param] = param._version
        return changed


def _is_captured(param: Tensor) -> bool:
    return param.is_cuda and torch.cuda.is_current_stream_capturing()


def _copied(params: Iterable[Tensor], states: States) -> Iterator[tuple[Tensor, Tensor]]:
    for param in params:
        if needs_master(param) and "master" in (state := states.get(param, {})):
            yield param, state["master"]
