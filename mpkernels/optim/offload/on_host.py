"""offload=True: the host steps."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from mpkernels.distributed.parts import parts_of
from mpkernels.optim.offload.copies import uninterrupted
from mpkernels.optim.offload.grads import HostGrads, Slices
from mpkernels.optim.offload.offload import Offload
from mpkernels.optim.offload.plan import OffloadedPlan
from mpkernels.optim.offload.twins import Twins


class OnHost(Offload):
    """Homes are twins, which stay."""

    arrived: HostGrads
    _option, _why = "True", "the host steps"

    def __init__(self) -> None:
        self.twins, self.arrived = Twins(), HostGrads()
        self._slices = Slices()

    def home(self, param: Tensor) -> AbstractContextManager[Tensor]:
        return nullcontext(self.twins.home(param))

    def begin_reading(self, params: Sequence[Tensor]) -> None:
        self.twins.follow(params)

    def settle(self) -> None:
        self.twins.send_all()

    def gather(self, optimizer: Any, params: Sequence[Tensor], grads: list[Any]) -> list[Any]:
        """Return the grads, of which some or all may have come to the host. Bring twins up to date with weights that
        somebody has written to."""
        super().gather(optimizer, params, grads)
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

    def plans(
        self, optimizer: Any, params: Sequence[Tensor], rows: Sequence[Any], places: list[int], grads: list[Any]
    ) -> list[OffloadedPlan]:
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
        return [OffloadedPlan(optimizer._rule, rows, params, places, sizes, *kept)]
