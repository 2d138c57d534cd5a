"""What a scaler and an optimizer of ours tell each other about a step."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpkernels.distributed.processes import Processes


class Handed(NamedTuple):
    """What a scaler hands over to a step: our scaler as arguments, torch's as attributes of the optimizer."""

    grad_scale: Tensor | None = None  # if the grads are still scaled
    found_inf: Any = None  # if the scaler has looked at the grads
    peers: Processes | None = None  # the processes that the scaler knows of
    outcome: Tensor | None = None  # a vector that our scaler reads the skip from
    scaler: Any = None  # to be told what all processes have found, where it has looked at this process's grads


NOTHING = Handed()  # where no scaler is


@dataclass
class Notes:
    """What our side notes on an optimizer until the scaler's next update, among what torch's scaler notes on it."""

    attempt: Any = None  # our scaler's of a step that is tried again (amp/retries.py)
    attempts: dict[torch.device, Any] = field(default_factory=dict)  # likewise, of unscaling
    step_unscales: bool | None = None  # whether the grads were scaled when the step began; kept if it is tried again
    step_asks: bool = False  # whether the step has asked, or will ask, the other processes
    skip_is_taken: bool = False  # a subclass of the scaler has asked before its super().step does

    @staticmethod
    def among(state: dict[str, Any]) -> "Notes":
        """Return the notes in the dict that torch's scaler keeps for an optimizer."""
        notes: Notes = state.setdefault("mpkernels", Notes())
        return notes
