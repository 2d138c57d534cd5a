"""What ``offload`` changes about an optimizer: where its states are, what its plans are, what becomes of grads."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor

from mpkernels._shared.parameters import params_of, unwrapped
from mpkernels._torch_private.tracing import as_written, may_be_compiled
from mpkernels.distributed.parts import part_of, placed_as
from mpkernels.optim.offload.grads import HostGrads

State = dict[str, Tensor]


class Offload:
    """Memory and streams of one optimizer whose states are on the host. Copies and pickles of the optimizer begin
    without. A class that inherits from this says where a step is computed."""

    arrived: HostGrads | None = None  # released grads
    _option: str
    _why: ClassVar[str]  # a step can be neither captured nor compiled

    def home(self, param: Tensor) -> AbstractContextManager[Tensor]:
        """Yield what states are made for in a parameter's place: a tensor on the host that holds what it holds. What is
        written to it gets to the parameter afterwards."""
        raise NotImplementedError

    def begin_reading(self, params: Sequence[Tensor]) -> None:
        """Have homes hold what their parameters hold."""

    def settle(self) -> None:
        """Give parameters what was written to homes that stay."""

    def wait(self) -> None:
        """Have the host wait for states that are on their way to it."""

    def is_ready(self, optimizer: Any, param: Tensor, state: State, group: dict[str, Any]) -> bool:
        """Return whether a step can take a parameter's states as they are."""
        return False

    def gather(self, optimizer: Any, params: Sequence[Tensor], grads: list[Any]) -> list[Any]:
        """Return the grads, of which some or all may have come to the host, before a step. Refuse a capture."""
        if any(param.is_cuda for param in params) and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{type(optimizer).__name__}: a step with offload={self._option} can't be captured in a CUDA graph, "
                f"because {self._why}; capture forward and backward alone, or leave offload out"
            )
        return grads

    def plans(
        self, optimizer: Any, params: Sequence[Tensor], rows: Sequence[Any], places: list[int], grads: list[Any]
    ) -> list[Any]:
        """Return the plans of the parameters at these places, which have states and a grad."""
        raise NotImplementedError

    def step_of(self, optimizer: Any, params: Sequence[Tensor]) -> Any:
        """Return the function that takes the optimizer's step, which torch.compile must not trace."""
        name, step = type(optimizer).__name__, optimizer._step
        if may_be_compiled() and any(param.is_cuda for param in params):
            why = f"with offload={self._option} must not be part of a full graph: {self._why}"
            return as_written(f"{name}: step", step, f"{why}; compile forward and backward alone")
        return step


def home_of(optimizer: Any, param: Tensor) -> AbstractContextManager[Tensor]:
    """Yield what an optimizer's states are made for: the parameter, or with ``offload`` its home on the host."""
    offload: Offload | None = optimizer._offload
    return nullcontext(param) if offload is None else offload.home(param)


def beside(home: Tensor, state: State) -> State:
    """Return a state, moved to where its parameter's home is: a loader may have put some of it elsewhere."""
    device = part_of(home.detach()).device
    if all(_is_there(value, device) for value in state.values()):
        return state  # the same object: a user may hold it
    return {key: it if _is_there(it, device) else _moved(home, it) for key, it in state.items()}


def weights_and_masters(optimizer: Any) -> Iterator[tuple[Tensor, State]]:
    """Yield each weight with an fp32 copy, as it is beside its states, and those states."""
    for param in params_of(optimizer):
        state = optimizer.state.get(param, {})
        if "master" in state:
            with home_of(optimizer, param) as home:
                yield home, state


def has_grads_on_host(optimizer: Any) -> bool:
    """Return whether some of an optimizer's grads wait on the host, where their parameters show none."""
    offload = getattr(unwrapped(optimizer), "_offload", None)  # other classes may have any attributes
    arrived = offload.arrived if isinstance(offload, Offload) else None
    return arrived is not None and any(map(arrived.have, params_of(optimizer)))


def _is_there(value: Any, device: torch.device) -> bool:
    return not isinstance(value, Tensor) or value.device == device


def _moved(home: Tensor, value: Tensor) -> Tensor:
    there: Tensor = part_of(value).to(part_of(home.detach()).device)
    return placed_as(home, there) if value.shape == home.shape else there
