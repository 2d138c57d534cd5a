"""Parameters that somebody else has written to since the last step: an earlier state that was restored, a clamp."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

States = Mapping[Tensor, Mapping[str, Any]]


class Written:
    """Knows those whose master is a copy, which has to follow. What is written through ``.data`` goes unseen."""

    def __init__(self, params: Iterable[Tensor], states: States) -> None:
        """As a step has left them."""
        self._versions = {param: param._version for param, _ in _copied(params, states)}

    def hand_on(self, params: Iterable[Tensor], states: States) -> None:
        """To their masters; what is still a master's rounding has more digits there."""
        for param, master in _copied(params, states):
            if self._versions.get(param, param._version) != param._version:
                master.copy_(torch.where(param == master.to(param.dtype), master, param))

    def note(self, param: Tensor, states: States) -> None:
        """It alone has been stepped."""
        self._versions |= Written([param], states)._versions


def _copied(params: Iterable[Tensor], states: States) -> Iterator[tuple[Tensor, Tensor]]:
    for param in params:
        if "master" in (state := states.get(param, {})):
            yield param, state["master"]
