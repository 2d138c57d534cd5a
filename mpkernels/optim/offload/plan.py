"""The plan of a step whose states are on the host: it steps bucket after bucket there, while grads and weights of other
buckets are on their way."""

from collections.abc import Sequence
from functools import partial
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor

from mpkernels._shared.parameters import by_device
from mpkernels.distributed.parts import parts_of
from mpkernels.distributed.shares import Parts
from mpkernels.ops.step.skip_and_clip import write_outcome
from mpkernels.optim import norm_without_plan
from mpkernels.optim.masters import needs_master
from mpkernels.optim.offload.buckets import in_buckets, in_order_of
from mpkernels.optim.offload.copies import BUCKET, dense, uninterrupted
from mpkernels.optim.offload.grads import HostGrads, Slices
from mpkernels.optim.offload.twins import Twins
from mpkernels.optim.optimizer_rule import OptimizerRule
from mpkernels.optim.plan import Group, Plan, State
from mpkernels.optim.step_plan import Verdict
from mpkernels.overflow.ledger import Ledger

_ON_HOST = torch.device("cpu")


class OffloadedPlan:
    """All parameters that have a grad, wherever they are. To the optimizer it is a plan like others."""

    has_grads = True

    def __init__(
        self,
        rule: OptimizerRule,
        rows: Sequence[tuple[Group, Tensor, State]],
        params: Sequence[Tensor],
        places: list[int],
        sizes: Sequence[int],
        ledger: Ledger,
        parts: Parts | None,
        twins: Twins,
        arrived: HostGrads,
        slices: Slices,
    ) -> None:
        """rows: of the optimizer's parameters, with twins in the place of those on a GPU. sizes: in bytes, of the grads
        at ``places``. arrived: grads that the step uses up."""
        self._params, self._places, self._homes = params, places, [rows[i][1] for i in places]
        self._buckets = list(in_buckets(places, sizes, BUCKET))
        self._plans = [Plan(rule, rows, bucket) for bucket in self._buckets]
        self._ledger, self._twins, self._arrived, self._slices = ledger, twins, arrived, slices
        stepped = [params[i] for i in places]
        self.device = stepped[0].device  # of the verdict
        self.has_16_bit_parameters = any(map(needs_master, stepped))
        self._shares = None if parts is None else parts.shares(stepped)
        self._kinds: list[Any] = []
        self._there: list[list[Tensor]] = []

    def look_and_step(self, *_: Any) -> bool:
        """Return False: the look at the grads comes before all buckets, not in a call that also steps."""
        return False

    @property
    def has_moved(self) -> bool:
        """Tell whether a parameter has another twin by now, or none any more."""
        return not all(map(is_, (self._twins.home(self._params[i]) for i in self._places), self._homes))

    first_has_moved = has_moved

    def _places_by_device(self, grads: list[Any]) -> dict[torch.device, list[int]]:
        """Return the places of the grads on each device."""
        return by_device((grads[i] for i in self._places), self._places)

    def look(self, grads: list[Any]) -> tuple[Tensor, Tensor]:
        """Return the sum of the grads' squares, and whether one holds an inf or NaN."""
        return norm_without_plan.look(parts_of([grads[i] for i in self._places]), self._shares, self.device)

    def step(
        self, grads: list[Any], verdict: Verdict, max_norm: float | None = None, skipped_steps: Tensor | None = None
    ) -> None:
        """Take one step, or skip it if the verdict is an overflow. The host waits for the verdict, and for the grads.
        If this raises, no parameter has been stepped."""
        self._twins.send_all()  # twins that were brought up to date with loaded masters
        scale, found_inf, total_sumsq = (None if it is None else it.to(_ON_HOST) for it in verdict[:3])
        outcome = torch.zeros(2, dtype=torch.float32)
        is_skipped = write_outcome(scale, found_inf, total_sumsq, outcome, None)
        skips = is_skipped is not None and bool(is_skipped)
        if skips:
            self._report(grads, verdict)
        else:
            buckets = self._brought(grads)
            host = self._on_host(grads, buckets)
            if len(self._plans) > 1:
                self._rehearse(host, max_norm)
        with uninterrupted():
            if verdict.outcome is not None:
                verdict.outcome.copy_(outcome)
            if skipped_steps is not None and skips:
                skipped_steps.add_(1)
            if not skips:
                self._take(host, buckets, Verdict(scale, None, total_sumsq), max_norm)
            self._arrived.forget()

    def _brought(self, grads: list[Any]) -> list[tuple[list[int], list[Tensor]]]:
        """Return, for each bucket, the places of the grads that are still on a GPU, and those grads."""
        found = []
        for bucket in self._buckets:
            places = [i for i in bucket if grads[i].is_cuda]
            found.append((places, [dense(part) for part in parts_of([grads[i] for i in places])]))
        return found

    def _on_host(self, grads: list[Any], buckets: list[tuple[list[int], list[Tensor]]]) -> list[Any]:
        """Return the grads with those on a GPU replaced by the place on the host where they will be."""
        kinds = [[(it.shape, it.stride(), it.dtype) for it in bucket_grads] for _, bucket_grads in buckets]
        if kinds != self._kinds:
            self._there = self._slices.lay_out([bucket_grads for _, bucket_grads in buckets])
            self._kinds = kinds
        host = list(grads)
        for (places, _), there in zip(buckets, self._there, strict=True):
            for i, it in zip(places, there, strict=True):
                host[i] = it
        return host

    def _rehearse(self, host: list[Any], max_norm: float | None) -> None:
        """Have each bucket's step check its arguments. These steps are skipped, so they do nothing else."""
        skip = Verdict(found_inf=torch.ones((), dtype=torch.float32))
        for plan in self._plans:
            plan.step(host, skip, max_norm)

    def _take(
        self,
        host: list[Any],
        buckets: list[tuple[list[int], list[Tensor]]],
        verdict: Verdict,
        max_norm: float | None,
    ) -> None:
        """Step each bucket on the host. Nothing is allocated on the GPU."""
        self._slices.begin(list(chain.from_iterable(bucket_grads for _, bucket_grads in buckets)))
        self._twins.begin()
        start = partial(self._start, buckets)
        try:
            for i in range(Slices.COUNT):
                start(i)
            for i, plan in enumerate(self._plans):
                self._slices.wait(i)
                plan.step(host, verdict, max_norm)
                start(i + Slices.COUNT)
                self._twins.send(self._params[k] for k in self._buckets[i])
        finally:
            self._twins.end()

    def _start(self, buckets: list[tuple[list[int], list[Tensor]]], i: int) -> None:
        if i < len(buckets):
            self._slices.start(i, buckets[i][1], self._there[i])

    def _report(self, grads: list[Any], verdict: Verdict) -> None:
        """Note in the ledger the facts about the grads of a skipped step."""
        places_by_device = self._places_by_device(grads)
        self._ledger.keep(places_by_device)
        for device, places in places_by_device.items():
            params = [self._params[i] for i in places]
            in_order = list(map(in_order_of, parts_of(params), parts_of([grads[i] for i in places])))
            found_inf = torch.ones((), dtype=torch.float32, device=device)
            self._ledger.fill(params, in_order, found_inf, verdict.grad_scale, False, lambda: self._params)
