"""What ``offload=True`` changes about an optimizer: where its states are, what its plan is, what becomes of grads."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mpkernels._shared.parameters import params_of, unwrapped
from mpkernels._torch_private.tracing import as_written, may_be_compiled
from mpkernels.distributed.parts import part_of, parts_of, placed_as
from mpkernels.optim.offload.copies import uninterrupted
from mpkernels.optim.offload.grads import HostGrads, Slices
from mpkernels.optim.offload.plan import OffloadedPlan
from mpkernels.optim.offload.twins import Twins

State = dict[str, Tensor]
_NO_GRAPH = "with offload=True must not be part of a full graph: the host steps; compile forward and backward alone"


class Offload:
    """Twins, pinned memory and streams of one optimizer. Copies and pickles of the optimizer begin without."""

    def __init__(self) -> None:
        self.twins, self.arrived = Twins(), HostGrads()
        self._slices = Slices()

    def gather(self, optimizer: Any, params: Sequence[Tensor], grads: list[Any]) -> list[Any]:
        """Return the grads, of which some or all may have come to the host. Bring twins up to date with weights that
        somebody has written to."""
        if len(self.twins) == 0 and not any(param.is_cuda for param in params):
            return grads
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{type(optimizer).__name__}: a step with offload=True can't be captured in a CUDA graph, because the "
                "host steps; capture forward and backward alone, or leave offload out"
            )
        self.twins.follow(params)
        have = self.arrived.have
        release = optimizer._release
        if not (release is not None and release.is_on) and not any(map(have, params)):
            return grads
        if not isinstance(optimizer.handed_over().found_inf, Tensor | None):  # torch's sets 0.0 if it sees no grads
            raise RuntimeError(
                f"{type(optimizer).__name__}: release_grads with offload=True has sent grads to the host, where "
                "torch's GradScaler doesn't look for them; use mpkernels.amp.GradScaler, or leave release_grads out"
            )
        with uninterrupted():
            for param in params:
                self.arrived.take(param)
            return [self.arrived.of(it) if have(it) else grad for it, grad in zip(params, grads, strict=True)]

    def step_of(self, optimizer: Any, params: Sequence[Tensor]) -> Any:
        """Return the function that takes the optimizer's step, which torch.compile must not trace."""
        name, step = type(optimizer).__name__, optimizer._step
        if may_be_compiled() and any(param.is_cuda for param in params):
            return as_written(f"{name}: step", step, _NO_GRAPH)
        return step

    def placed(self, param: Tensor, state: State) -> tuple[Tensor, State]:
        """Return a parameter's home, and its state, moved there: a loader may have put some of it elsewhere."""
        home = self.twins.home(param)
        device = part_of(home.detach()).device
        if all(_is_there(value, device) for value in state.values()):
            return home, state
        return home, {key: it if _is_there(it, device) else _moved(home, it) for key, it in state.items()}

    def plan(
        self, optimizer: Any, params: Sequence[Tensor], rows: Sequence[Any], places: list[int], grads: list[Any]
    ) -> Any:
        """Return the one plan of the parameters at these places. An optimizer uses it like a Plan."""
        for i in places:
            if params[i].device.type not in ("cuda", "cpu"):
                raise ValueError(
                    f"{type(optimizer).__name__}: offload=True takes parameters on CUDA devices and CPUs, got "
                    f"params[{i}] on {params[i].device}; leave offload out"
                )
        rows = list(rows)
        for i in places:
            group, param, state = rows[i]
            rows[i] = group, self.twins.home(param), state
        sizes = [part.numel() * part.itemsize for part in parts_of([grads[i] for i in places])]
        kept = optimizer._ledger, optimizer._agreement.parts, self.twins, self.arrived, self._slices
        return OffloadedPlan(optimizer._rule, rows, params, places, sizes, *kept)


def home_of(optimizer: Any, param: Tensor) -> Tensor:
    """Return what an optimizer's states are made for: the parameter, or with ``offload`` its twin on the host."""
    offload: Offload | None = optimizer._offload
    return param if offload is None else offload.twins.home(param)


def weights_and_states(optimizer: Any) -> tuple[list[Tensor], Mapping[Tensor, State]]:
    """Return the weights that lie beside their states, and the states by weight."""
    params, states = params_of(optimizer), optimizer.state
    if optimizer._offload is None:
        return params, states
    homes = {param: home_of(optimizer, param) for param in params if states.get(param)}
    return list(homes.values()), {home: states[param] for param, home in homes.items()}


def has_grads_on_host(optimizer: Any) -> bool:
    """Return whether some of an optimizer's grads wait on the host, where their parameters show none."""
    offload = getattr(unwrapped(optimizer), "_offload", None)  # other classes may have any attributes
    return isinstance(offload, Offload) and any(map(offload.arrived.have, params_of(optimizer)))


def _is_there(value: Any, device: torch.device) -> bool:
    return not isinstance(value, Tensor) or value.device == device


def _moved(home: Tensor, value: Tensor) -> Tensor:
    there: Tensor = part_of(value).to(part_of(home.detach()).device)
    return placed_as(home, there) if value.shape == home.shape else there
