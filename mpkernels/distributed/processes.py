"""Processes that each hold one part of the grads. They clip by one common norm, and skip the same steps."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, distributed

from mpkernels._shared.parameters import put_on


class Processes:
    """A process group whose processes agree on one norm and one found_inf. Copies of this object share the group."""

    def __init__(self, group: Any, holds_parts: bool = True, device: torch.device | None = None) -> None:
        """holds_parts: whether each process holds one part of the grads, so that their squares are added up. If not,
        the processes only skip together. device: where to communicate if this process has no parameters."""
        self.group, self.holds_parts, self._device = group, holds_parts, device

    def __deepcopy__(self, memo: dict[int, Any]) -> "Processes":
        return self

    def __reduce__(self) -> Any:
        raise TypeError("process_group can't be pickled: save state_dict() and load it into one that has the group")

    def agree(
        self,
        params: Sequence[Tensor],
        total_sumsq: Tensor | None,
        found_inf: Tensor | float | None,
        has_failed: bool = False,
        may_change: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the sum of squares over all processes; 1 if any of them has found an inf or NaN or has failed, else 0;
        how many have failed; and in how many hooks may yet change the grads. Every process must call this, even without
        grads, or where an exception ends its step. ``params`` only determine the device. The host doesn't wait."""
        there = self.device_of(params)
        nothing = torch.zeros((), dtype=torch.float64, device=there)
        numbers = total_sumsq, found_inf, float(has_failed), float(may_change)
        sums = torch.stack([nothing if number is None else _number(number, there) for number in numbers])
        distributed.all_reduce(sums, group=self.group)
        skips = (sums[1] + sums[2]).clamp(max=1).float()  # torch's optimizers take any other number than 1 for 0
        return sums[0], skips, sums[2], sums[3]

    def size(self) -> int:
        return distributed.get_world_size(self.group)

    def norm(self, params: Sequence[Tensor], norm: Tensor | float, norm_type: float) -> Tensor:
        """Return the norm over all processes, each of which passes the norm of its own grads."""
        there, rank = self.device_of(params), distributed.get_rank(self.group)
        norms = torch.zeros(distributed.get_world_size(self.group), dtype=torch.float64, device=there)
        norms[rank] = _number(norm, there)
        distributed.all_reduce(norms, group=self.group)
        total: Tensor = torch.linalg.vector_norm(norms, norm_type)
        return total

    def refuse_if_failed(self, op: str, failed: Tensor) -> None:
        """Raise if another process has failed, where the host knows that without waiting for a device."""
        if failed.device.type == "cpu" and not torch.compiler.is_compiling() and failed.item() > 0:
            raise RuntimeError(f"{op} has failed in another process, whose error says why")

    def device_of(self, params: Sequence[Tensor]) -> torch.device:
        """Return the parameters' device if the group's backend supports it, else one that it supports."""
        device = params[0].device if len(params) > 0 else self._device
        served = {it.partition(":")[0] for it in distributed.get_backend_config(self.group).split(",")}
        if device is not None and device.type in served:
            return device
        accelerator = torch.accelerator.current_accelerator()
        return torch.device("cpu") if accelerator is None or accelerator.type not in served else accelerator


def _number(number: Tensor | float, device: torch.device) -> Tensor:
    if isinstance(number, Tensor):
        return put_on(device, number).double().reshape(())
    return torch.full((), number, dtype=torch.float64, device=device)  # no copy, which a CUDA graph's capture refuses


def given(op: str, process_group: Any) -> Processes | None:
    """Return what the user's process_group stands for."""
    if process_group is None:
        return None
    if not distributed.is_available() or not isinstance(process_group, distributed.ProcessGroup):
        raise TypeError(f"{op}: process_group must be a torch.distributed.ProcessGroup or None, got {process_group!r}")
    return Processes(process_group)


def from_first_rank(op: str, value: Any, error: Exception | None, group: Any) -> Any:
    """Return the first rank's value. All processes must call this; if one passes an error, all raise."""
    mine = value, None if error is None else repr(error)
    everybody = [mine]
    if are_several():
        everybody *= distributed.get_world_size(group)
        distributed.all_gather_object(everybody, mine, group=group)
    if error is not None:
        raise error
    for rank, (_, text) in enumerate(everybody):
        if text is not None:
            raise RuntimeError(f"{op}: rank {rank} raised {text}")
    return everybody[0][0]


def are_several() -> bool:
    is_there = distributed.is_available() and distributed.is_initialized()
    return is_there and distributed.get_world_size() > 1
