"""The plan of one device: parameters that step together, with their states; prepared once and reused in each step."""

import math
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, repeat
from operator import is_, itemgetter
from typing import Any

import torch
from torch import Tensor

from mpkernels._shared.parameters import are_any_sharded, put_on, real, real_values
from mpkernels._torch_private.modes import for_real
from mpkernels.distributed.parts import parts_in, parts_of
from mpkernels.distributed.shares import Parts
from mpkernels.ops.grads.grad_stats import grad_stats
from mpkernels.ops.step.op import StepOps
from mpkernels.optim.masters import needs_master
from mpkernels.optim.optimizer_rule import OptimizerRule
from mpkernels.optim.step_plan import Verdict
from mpkernels.overflow.ledger import Ledger

Group = dict[str, Any]
State = dict[str, Tensor]


class Plan:
    """The parameters of one device, group after group, with the methods that check their grads and step them."""

    has_grads = True

    def __init__(
        self,
        rule: OptimizerRule,
        all_rows: Sequence[tuple[Group, Tensor, State]],
        places: list[int],
        ledger: Ledger | None = None,
        parts: Parts | None = None,
        is_for_once: bool = False,
        targets: list[Tensor] | None = None,
    ) -> None:
        """Make a plan of the optimizer's rows at ``places``. ``ledger`` holds the reports on skipped steps, and
        ``parts`` says how much each parameter counts in a norm over processes. ``is_for_once``: the plan makes a
        single step, so C++ need not keep its states. ``targets``: what is stepped in the parameters' place."""
        self._rule, self._ops = rule, rule.ops
        self._places, self._takes_all = places, len(places) == len(all_rows)
        rows = [all_rows[i] for i in places]
        groups, params, states = zip(*((group, param, parts_in(state)) for group, param, state in rows), strict=True)
        self._wholes, self._parts = params, parts_of(params)  # a DTensor's part is what kernels take
        self.params = self._parts if targets is None else targets
        self._is_sharded = are_any_sharded(params)
        self.device = self.params[0].device
        self._kinds = list(map(_kind, params))
        all_params = partial(map, itemgetter(1), all_rows)
        self.report = None if ledger is None else ledger.report_for(params, self.device, all_params)
        self._is_complex = any(map(torch.is_complex, params))
        self.has_16_bit_parameters = any(map(needs_master, params))
        self.groups, sizes = _runs_of(groups)
        nothing = torch.empty(0, device=self.device)
        self._lists = *_lists_of(rule, groups, states, nothing), sizes
        shares = [1.0] if parts is None else parts.shares(params)
        self._shares = None if set(shares) == {1.0} else torch.tensor(shares, dtype=torch.float64, device=self.device)
        self._options: list[Any] = []  # that these were made of
        self._hyperparameters: tuple[list[Any], ...] = ()
        self._native: _NativePlan | None = None
        self._may_be_native = not is_for_once and type(nothing) is Tensor  # C++ can't keep fake tensors

    def _grads_here(self, grads: list[Any]) -> list[Tensor]:
        """Return this plan's grads, out of a list with one grad for each of the optimizer's parameters."""
        here = grads if self._takes_all else [grads[i] for i in self._places]
        here = parts_of(here) if self._is_sharded else here
        try:
            return list(map(real, here)) if self._is_complex else here
        except RuntimeError:  # a grad is a conjugated view; to ask each would take as long as to view it
            return list(map(real_values, here))

    def look(self, grads: list[Any]) -> tuple[Tensor, Tensor]:
        """Return the sum of the grads' squares, and whether one holds an inf or NaN."""
        stats = grad_stats(self._grads_here(grads))
        total_sumsq = stats.total_sumsq if self._shares is None else (stats.sumsq * self._shares).sum()
        return total_sumsq, stats.found_inf

    @property
    def has_moved(self) -> bool:
        """Tell whether a parameter has gone to another device or dtype, or its part to another tensor."""
        return (self._is_sharded and self._is_elsewhere) or list(map(_kind, self._wholes)) != self._kinds

    @property
    def _is_elsewhere(self) -> bool:
        return not _are_same(parts_of(self._wholes), self._parts)

    @property
    def first_has_moved(self) -> bool:
        """Tell whether the first parameter has moved. A model moves as a whole."""
        return (self._is_sharded and self._is_elsewhere) or _kind(self._wholes[0]) != self._kinds[0]

    def look_and_step(
        self, grads: list[Any], verdict: Verdict, max_norm: float | None, skipped_steps: Tensor | None
    ) -> bool:
        """Have C++ check the grads and step with them in one call. Return False, and do nothing, where another kernel
        runs."""
        return self._step_in_one_call(grads, verdict, max_norm, skipped_steps, True)

    def step(
        self, grads: list[Any], verdict: Verdict, max_norm: float | None = None, skipped_steps: Tensor | None = None
    ) -> None:
        """Take one step, or skip it if the verdict is an overflow. ``skipped_steps``, if given, counts the skips."""
        if self._step_in_one_call(grads, verdict, max_norm, skipped_steps, False):
            return
        if list(map(_kind, self._wholes)) != self._kinds:
            raise RuntimeError(
                f"{self._ops.rule.op}: a parameter has changed its device or dtype since its state was made"
            )
        shared = self._shared(verdict, max_norm, skipped_steps)
        params = list(map(real, self.params)) if self._is_complex else self.params
        self._ops.step(params, self._grads_here(grads), *self._lists, *shared)
        self._increment_versions([])

    def check(self, grads: list[Any]) -> None:
        """Raise what a step with these grads would raise, and name what is wrong."""
        params = list(map(real, self.params)) if self._is_complex else self.params
        self._ops.step._check(params, self._grads_here(grads), *self._lists, *self._shared(Verdict(), None, None))

    def _step_in_one_call(
        self, grads: list[Any], verdict: Verdict, max_norm: float | None, skipped_steps: Tensor | None, looks: bool
    ) -> bool:
        """Have C++ step, and look at the grads before that if it shall. Return False where another kernel runs."""
        is_possible = self._may_be_native and not torch.compiler.is_compiling()
        by_plan = self._ops.by_plan.on(self.device) if is_possible else None
        if by_plan is None:
            return False
        params = list(map(real, self.params)) if self._is_complex else self.params
        grads_here, shared = self._grads_here(grads), self._shared(verdict, max_norm, skipped_steps)
        if self._native is None or self._native.by_plan is not by_plan:  # other kernels run now than last time
            self._native = _NativePlan(self._ops, by_plan, self.device, self._lists)
        try:
            by_plan(self._native.number, params, grads_here, *shared, looks)
        except RuntimeError:
            self._ops.step._check(params, grads_here, *self._lists, *shared)
            raise
        self._increment_versions(params)
        return True

    def _shared(self, verdict: Verdict, max_norm: float | None, skipped_steps: Tensor | None) -> tuple[Any, ...]:
        """Return what a step takes beside its lists of tensors: hyperparameters of each group, and the verdict."""
        options = [(*self._rule.hyperparameters(group), group["maximize"]) for group in self.groups]
        flat = [*chain.from_iterable(options)]
        if not _are_same(flat, self._options):
            self._hyperparameters = self._hyperparameters_of(options)
            self._options = [] if any(isinstance(x, Tensor) for x in flat) else flat  # a tensor's number may change
        return (
            *self._hyperparameters,
            *(None if it is None else put_on(self.device, it) for it in verdict[:3]),
            *(max_norm or math.inf, verdict.outcome, skipped_steps, self.report),
        )

    def _hyperparameters_of(self, options: list[tuple[Any, ...]]) -> tuple[list[Any], ...]:
        """Return a list of each hyperparameter and of maximize, and the hyperparameters that are read on the device."""
        *by_name, maximize = zip(*options, strict=True)
        count = self._ops.rule.may_be_tensors
        numbers: list[Any] = by_name
        tensors: list[Tensor] = []
        if any(isinstance(x, Tensor) for values in by_name[:count] for x in values):
            tensors = self._on_device(by_name[:count])
            numbers = [[0.0 if self._is_read_in_place(x) else x for x in values] for values in by_name[:count]]
            numbers += by_name[count:]
        # The op's schema makes them floats, and refuses text, which float() takes.
        return *map(list, numbers), list(map(bool, maximize)), tensors

    def _increment_versions(self, params: list[Tensor]) -> None:
        """Tell autograd that these parameters have changed, and the DTensors whose parts they are."""
        torch.autograd.graph.increment_version([*params, *self._wholes] if self._is_sharded else params)

    def _on_device(self, by_name: Sequence[Sequence[Any]]) -> list[Tensor]:
        """Return each group's hyperparameters in turn: the tensors, and an empty tensor for each number."""
        hypers = list(chain.from_iterable(zip(*by_name, strict=True)))
        if not any(map(self._is_read_in_place, hypers)):
            return []
        nothing = torch.empty(0, device=self.device)
        return [self._number(x) if self._is_read_in_place(x) else nothing for x in hypers]

    def _is_read_in_place(self, x: Any) -> bool:
        """Return whether kernels read this hyperparameter from a tensor. A tensor on the host is passed by value
        instead if the parameters are on a GPU, because copying it there would make the host wait."""
        is_by_value = self.device.type != "cpu" and not torch.compiler.is_compiling()
        return isinstance(x, Tensor) and not (is_by_value and x.device.type == "cpu")

    def _number(self, tensor: Tensor) -> Tensor:
        """Return the number where it lies, if it lies on the device in a dtype that kernels read."""
        is_read = tensor.dtype in (torch.float32, torch.float64)
        return tensor.to(self.device, tensor.dtype if is_read else torch.float64)


class _NativePlan:
    """C++'s half of a plan, which keeps the states until this object is collected."""

    def __init__(
        self, ops: StepOps, by_plan: Callable[..., None], device: torch.device, lists: tuple[Any, ...]
    ) -> None:
        make, forget = ops.plan.on(device), ops.forget.on(device)
        if make is None or forget is None:
            raise RuntimeError(
                f"mpkernels: the compiled kernels lack {ops.plan.name} or {ops.forget.name}; build them anew"
            )
        self.by_plan, self.number = by_plan, make(*lists)
        self.end = weakref.finalize(self, _unseen, forget, self.number)


def _unseen(function: Callable[..., None], *arguments: Any) -> None:
    """Call the function unseen by torch's tracing: garbage is collected at any time, also while torch traces."""
    with for_real():
        function(*arguments)


def _runs_of(groups: Sequence[Group]) -> tuple[list[Group], list[int]]:
    """Return each group once, and how many parameters it has here."""
    firsts = [i for i, group in enumerate(groups) if i == 0 or group is not groups[i - 1]]
    return [groups[i] for i in firsts], [end - i for i, end in zip(firsts, [*firsts[1:], len(groups)], strict=True)]


def _lists_of(
    rule: OptimizerRule, groups: Sequence[Group], states: Sequence[State], nothing: Tensor
) -> tuple[list[Tensor], ...]:
    """Return the states as a step takes them: a list of each kind, which is empty if no parameter has that kind."""
    keys = list(map(rule.keys, groups))
    kept = [
        [state[key] if key in its_keys else nothing for its_keys, state in zip(keys, states, strict=True)]
        for key in rule.ops.rule.states
    ]
    masters = [state.get("remainder", state.get("master", nothing)) for state in states]
    scales = [
        state.get("scales", nothing) if its_keys else nothing for its_keys, state in zip(keys, states, strict=True)
    ]
    lists = (
        list(map(real, kind)) if any(each is not nothing for each in kind) else [] for kind in (*kept, masters, scales)
    )
    # The step count of a parameter without states.
    uncounted = partial(torch.zeros, (), dtype=torch.float32, device=nothing.device)
    return *lists, [state["step"] if "step" in state else uncounted() for state in states]


def _kind(param: Tensor) -> tuple[torch.device, torch.dtype]:
    return param.device, param.dtype


class Foundations:
    """The objects that plans were made of. The plans stay valid as long as every group, parameter and state tensor is
    the same object and the same parameters have grads. C++ checks each tensor's memory anew in each step."""

    def __init__(
        self,
        rule: OptimizerRule,
        groups: list[Group],
        params: list[Tensor],
        grads: list[Tensor | None],
        states: dict[Tensor, State],
    ) -> None:
        self._rule, self._groups, self._params = rule, list(groups), params
        self._shape_of_groups = _shape(rule, groups)
        self._without_grad = list(map(is_, grads, repeat(None)))
        self._keys, self._states = list(states), list(states.values())  # a user may keep something else there
        # Views, which show what the states hold now. To make them anew takes a third of the time of ``hold``.
        views = [dict.values(state) for state in self._states if isinstance(state, dict)]
        self._held_now, self._held = [*views, _END], [*chain.from_iterable(views), *_END]

    def hold(
        self, groups: list[Group], params: list[Tensor], grads: list[Tensor | None], states: dict[Tensor, State]
    ) -> bool:
        return (
            _are_same(groups, self._groups)
            and _are_same(params, self._params)
            and list(map(is_, grads, repeat(None))) == self._without_grad
            and _shape(self._rule, groups) == self._shape_of_groups
            and _are_same(states, self._keys)
            and _are_same(states.values(), self._states)
            and all(map(is_, chain.from_iterable(self._held_now), self._held))
        )


_END = (object(),)  # an end mark that no other list holds, so that lists of other lengths differ


def _are_same(some: Any, others: list[Any]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))


def _shape(rule: OptimizerRule, groups: list[Group]) -> list[tuple[Any, ...]]:
    """Return what decides which states there are. A new key changes the number of keys, and may be forbidden."""
    return [
        (len(group), len(group["params"]), rule.has_optional(group), group["master"], group["state_dtype"])
        for group in groups
    ]
