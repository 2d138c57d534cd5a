"""The parameters of a device that step together, group after group, and what they step with."""

import math
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain
from operator import is_, itemgetter
from typing import Any

import torch
from torch import Tensor

from mpkernels import _glance
from mpkernels.ops.adamw import adamw as op
from mpkernels.ops.grads.grad_stats import GradStats, grad_stats
from mpkernels.optim.masters import needs_master
from mpkernels.overflow.ledger import Ledger
from mpkernels.parameters import real

Group = dict[str, Any]
State = dict[str, Tensor]


class Table:
    """Holds on to the tensors, so that a step need only bring the grads."""

    def __init__(
        self,
        all_rows: Sequence[tuple[Group, Tensor, State]],
        places: list[int],
        ledger: Ledger | None = None,
        is_for_once: bool = False,
    ) -> None:
        """places: which of the rows are this table's. Those of a group follow each other. ledger: knows where a step
        that is skipped leaves its report."""
        self._places, self._takes_all = places, len(places) == len(all_rows)
        rows = [all_rows[i] for i in places]
        groups, params, states = zip(*rows, strict=True)
        self.params, self.device = list(params), params[0].device
        self._kinds = list(map(_kind, params))
        of_all = partial(map, itemgetter(1), all_rows)
        self.report = None if ledger is None else ledger.report_for(self.params, self.device, of_all)
        self._is_complex = any(map(torch.is_complex, params))
        self.has_16_bit_parameters = any(map(needs_master, params))
        self.groups: list[Group] = []
        sizes: list[int] = []
        for group in groups:
            if not self.groups or group is not self.groups[-1]:
                self.groups.append(group)
                sizes.append(0)
            sizes[-1] += 1
        nothing = torch.empty(0, device=self.device)
        largest = [state["max_exp_avg_sq"] if group["amsgrad"] else nothing for group, _, state in rows]
        masters = [state.get("remainder", state.get("master", nothing)) for state in states]
        scales = [state.get("scales", nothing) for state in states]
        self._lists = (
            [real(state["exp_avg"]) for state in states],
            [real(state["exp_avg_sq"]) for state in states],
            *(
                list(map(real, it)) if any(each is not nothing for each in it) else []
                for it in (largest, masters, scales)
            ),
            [state["step"] for state in states],
            sizes,
        )
        self._by_plan: Callable[..., bool] | None = None
        self._forget: weakref.finalize[..., Table] | None = None
        # functorch's wrappers have no memory
        with nullcontext() if torch.compiler.is_compiling() else torch._C._DisableFuncTorch():
            self._handle = torch.zeros(1, dtype=torch.int64, device="cpu")  # the address of a plan, if there is one
            self._seen = torch.empty(_glance.WORDS * len(rows), dtype=torch.int64, device="cpu")
        self._has_plan = not is_for_once and type(self._handle) is Tensor  # nor has a stand-in

    def _own(self, grads: list[Any]) -> list[Tensor]:
        """Of one for each row of all."""
        own = grads if self._takes_all else [grads[i] for i in self._places]
        return list(map(real, own)) if self._is_complex else own

    def stats(self, grads: list[Any]) -> GradStats:
        return grad_stats(self._own(grads))

    @property
    def has_moved(self) -> bool:
        """To another device or dtype, be it one parameter alone."""
        return list(map(_kind, self.params)) != self._kinds

    @property
    def first_has_moved(self) -> bool:
        """As a model does as a whole."""
        return _kind(self.params[0]) != self._kinds[0]

    def can_look_at_grads(self) -> bool:
        """Within the step, which then need not be handed them twice."""
        return self._has_plan and not torch.compiler.is_compiling() and op.by_plan.on(self.device.type) is not None

    def sees(self, params: list[Tensor], known: list[Tensor], grads: list[Any]) -> bool:
        """Whether these are the known ones of all rows, and a glance is enough for a step; it fetches the grads."""
        is_ready = self._by_plan is not None and not self.first_has_moved and _glance.can_see()
        return is_ready and _glance.at(params, known, self.params, grads, self._seen)

    def step(
        self,
        grads: list[Any],
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
        total_sumsq: Tensor | None,
        max_norm: float | None,
        told: Tensor | None,
        skipped_steps: Tensor | None,
        guarded: bool,
        is_seen: bool = False,
    ) -> None:
        """is_seen: by the glance before."""
        grads = self._own(grads)
        params = list(map(real, self.params)) if self._is_complex else self.params
        flags = grad_scale, found_inf, total_sumsq, max_norm or math.inf, told, skipped_steps, self.report
        shared = *self._hyperparameters(), *flags
        by_plan = op.by_plan.on(self.device.type)
        if by_plan is None or not self._has_plan or torch.compiler.is_compiling():
            if guarded:
                raise RuntimeError("adamw_: only a plan looks at grads within a step")
            if self.has_moved:
                raise RuntimeError("adamw_: a parameter has changed its device or dtype since its state was made")
            op._adamw(params, grads, *self._lists, *shared)
            return
        self._plan_for(by_plan)
        try:
            # One of them all the same, for the dispatcher to know the device.
            if not is_seen or not by_plan(self._handle, self._seen, params[:1], [], *shared, guarded):
                by_plan(self._handle, None, params, grads, *shared, guarded)
        except RuntimeError:
            op._adamw._check(params, grads, *self._lists, *shared)
            raise
        torch.autograd.graph.increment_version(params)

    def _plan_for(self, by_plan: Callable[..., bool]) -> None:
        """Unless it is done; the kernels that run now may be others than last time."""
        if self._by_plan is by_plan:
            return
        if self._forget is not None:
            self._forget()
        plan, forget = op.plan.on(self.device.type), op.forget.on("cpu")
        if plan is None or forget is None:
            raise RuntimeError("AdamW: the compiled kernels lack adamw_plan or adamw_forget; build them anew")
        plan(self._handle, *self._lists)
        self._by_plan, self._forget = by_plan, weakref.finalize(self, _call_for_real, forget, self._handle)

    def _hyperparameters(self) -> tuple[Any, ...]:
        groups = self.groups
        betas = [group["betas"] for group in groups]
        of_each = [group["lr"] for group in groups], [beta1 for beta1, _ in betas], [beta2 for _, beta2 in betas]
        return (
            *([0.0 if self._is_read_in_place(x) else float(x) for x in row] for row in of_each),
            [float(group["weight_decay"]) for group in groups],
            [float(group["eps"]) for group in groups],
            [bool(group["maximize"]) for group in groups],
            self._on_device(of_each),
        )

    def _on_device(self, of_each: tuple[list[Any], ...]) -> list[Tensor]:
        """lr and both betas of each group, in turn: those that are tensors, and nothing for those that aren't."""
        hypers = list(chain.from_iterable(zip(*of_each, strict=True)))
        if not any(map(self._is_read_in_place, hypers)):
            return []
        nothing = torch.empty(0, device=self.device)
        return [self._number(x) if self._is_read_in_place(x) else nothing for x in hypers]

    def _is_read_in_place(self, x: Any) -> bool:
        """A number on the host goes by value, as everywhere in torch: to copy it to the device would wait."""
        is_by_value = self.device.type != "cpu" and not torch.compiler.is_compiling()
        return isinstance(x, Tensor) and not (is_by_value and x.device.type == "cpu")

    def _number(self, tensor: Tensor) -> Tensor:
        """Read where it lies, if it lies on the device in a dtype that kernels read."""
        is_read = tensor.dtype in (torch.float32, torch.float64)
        return tensor.to(self.device, tensor.dtype if is_read else torch.float64)


def _call_for_real(function: Callable[..., None], *arguments: Any) -> None:
    """Garbage is collected at any time, also while torch traces."""
    with torch._C._DisableTorchDispatch(), torch._C._DisableFuncTorch():
        function(*arguments)


def _kind(param: Tensor) -> tuple[torch.device, torch.dtype]:
    return param.device, param.dtype


class Fingerprint:
    """Tells whether any tensor that tables were made of has been replaced. Those that it compares are kept alive, so
    that no other can take their place in memory. What a tensor's own memory has become, C++ looks at in each step."""

    def __init__(
        self, groups: list[Group], params: list[Tensor], grads: list[Tensor | None], states: dict[Tensor, State]
    ) -> None:
        self.groups, self.params, self.states = list(groups), params, _glance.held(states)
        self.shape_of_groups = _shape(groups)
        self.present = [grad is not None for grad in grads]

    def fits_states(self, groups: list[Group], states: dict[Tensor, State]) -> bool:
        """All but parameters and grads."""
        has_same_groups = len(groups) == len(self.groups) and all(map(is_, groups, self.groups))
        return has_same_groups and _shape(groups) == self.shape_of_groups and _glance.holds(states, self.states)

    def fits(
        self, groups: list[Group], params: list[Tensor], grads: list[Tensor | None], states: dict[Tensor, State]
    ) -> bool:
        return (
            len(params) == len(self.params)
            and all(map(is_, params, self.params))
            and [grad is not None for grad in grads] == self.present
            and self.fits_states(groups, states)
        )

    def sees(
        self,
        tables: list[Table],
        groups: list[Group],
        params: list[Tensor],
        grads: list[Tensor | None],
        states: dict[Tensor, State],
    ) -> bool:
        """Whether a glance tells that all is as it was, but for what the grads hold. It fetches them."""
        return len(tables) == 1 and self.fits_states(groups, states) and tables[0].sees(params, self.params, grads)


def _shape(groups: list[Group]) -> list[tuple[int, bool]]:
    return [(len(group["params"]), group["amsgrad"]) for group in groups]
