"""What all optimizers of this room do: masters, clipping, checks, the step itself, checkpoints. It names no rule."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.cuda import is_current_stream_capturing
from torch.nn import Module

from mpkernels._shared.parameters import are_any_sharded, by_device, params_of, refuse_sparse
from mpkernels._torch_private.tracing import as_written, may_be_compiled
from mpkernels.distributed import processes
from mpkernels.distributed.parts import settled_grads
from mpkernels.distributed.processes import Processes
from mpkernels.ops.step.skip_and_clip import write_outcome
from mpkernels.optim import (
    checkpoint,
    common_verdict,
    group_options,
    masters,
    param_state,
    torchao_offload,
    under_scaler,
    zero_redundancy,
)
from mpkernels.optim import offload as offloading
from mpkernels.optim.gradient_release import GradientRelease, end_earlier_releases, steps_in_backward
from mpkernels.optim.optimizer_rule import OptimizerRule
from mpkernels.optim.plan import Foundations, Plan, Verdict
from mpkernels.optim.step_outcome import StepOutcome, count_of_skips, found_here, shown_guard
from mpkernels.overflow.first_nonfinite import find_nonfinite
from mpkernels.overflow.ledger import Ledger
from mpkernels.overflow.report import OverflowReport


class Engine(torch.optim.Optimizer):
    """The optimizers' common part. A class that inherits from this and from one of torch's adds a constructor and
    ``_rule``."""

    #: The norm of the last step's unscaled grads, before clipping: fp32, on the device. None if the step computed none.
    #: A compiled step doesn't set it (see ``step_was_skipped``).
    grad_norm: Tensor | None = None
    skipped_steps = count_of_skips

    _rule: OptimizerRule
    _step_supports_amp_scaling = under_scaler.TakesScale()  # torch's GradScaler hands over its scale and found_inf
    _finds_inf = True  # our GradScaler hands over its scale and `outcome`, and reads skips from the latter
    _peers: Processes | None = None  # the processes that hold other parts of the grads
    _scaler: torch.amp.GradScaler | None = None  # the scaler that last asked whether it may hand its scale over
    _step_outcome = StepOutcome()  # of no step yet
    _skips: Tensor | None = None  # the count that the kernels write, behind skipped_steps
    _release: GradientRelease | None = None
    offload = False
    _offload: offloading.Offload | None = None
    _is_loaded = False  # whether states were loaded since the last step; the model may be loaded later

    def _take_options(
        self, master: str, state_dtype: Any, max_norm: Any, guard: Any, process_group: Any, offload: bool = False,
        **numbers: Any,
    ) -> None:  # fmt: skip
        """Check and keep the options beyond torch's, and check its numbers, before torch's constructor."""
        group_options.check_numbers(type(self).__name__, numbers)
        group_options.check_global(type(self).__name__, max_norm, guard, offload)
        self.master, self.state_dtype, self.max_norm, self.guard = master, state_dtype, max_norm, guard
        self.offload = offload
        self._peers = processes.given(type(self).__name__, process_group)
        zero_redundancy.follow()
        self._start_afresh()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as torch does. It may set its own ``master`` and ``state_dtype``; a bad group is not kept."""
        super().add_param_group(param_group)
        group_options.leave_scaling_to_torch(self)
        group = self.param_groups[-1]
        group_options.complete(self, group)
        try:
            group_options.check_group(self, group)
            torchao_offload.refuse(self, group["params"])
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise
        end_earlier_releases(type(self).__name__, group["params"])
        if self._release is not None:
            self._release.add_to_host(group["params"])

    def __repr__(self) -> str:
        name, rest = super().__repr__().split("\n", 1)
        group = self._peers and self._peers.group
        offload = ", offload: True" if self.offload else ""
        guard = shown_guard(self)
        return f"{name}\nmax_norm: {self.max_norm}, guard: {guard}, process_group: {group}{offload}\n{rest}"

    def _start_afresh(self) -> None:
        """Forget everything that was derived from the parameters and their states."""
        self._forget_plans()
        if self.offload and self._offload is None:
            self._offload = offloading.Offload()
        self._step_outcome = StepOutcome()
        self._ledger = Ledger()

    def _forget_plans(self) -> None:
        """Have the next step make plans anew, and a step that has failed not be tried again."""
        self._plans: list[Plan] = []
        self._foundations: Foundations | None = None

    @property
    def step_was_skipped(self) -> Tensor | None:
        """Whether the newest step that the device has finished was skipped because of an inf or NaN.

        A bool, 0-dim, on the host. Reading it never waits for the device. None if no step has finished yet, or if the
        last step did not check its grads. A compiled step sets neither this nor grad_norm, because torch.compile drops
        the attributes that a step sets: they still tell of the last step that was not compiled. It counts skipped_steps
        if such a step has begun the count.
        """
        return self._step_outcome.was_skipped()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step with the grads of all parameters, or skip it if the guard or a scaler finds an inf or NaN.

        Args:
            closure: a function that runs forward and backward and returns the loss. ``step`` returns its result.
        """
        if self.defaults.get("differentiable"):
            theirs = super().step.__func__  # type: ignore[attr-defined]
            return (theirs.__wrapped__ if hasattr(theirs, "hooked") else theirs)(self, closure)  # our hooks have run
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            params = params_of(self)
            sharded = are_any_sharded(params)
            take_step = self._step
            if sharded and may_be_compiled():
                take_step = as_written(f"{type(self).__name__}: step", take_step)
            elif self._offload is not None:
                take_step = self._offload.step_of(self, params)
            try:
                take_step(params, sharded)
            except (RuntimeError, TypeError, ValueError) as error:
                group_options.name_cause(self, params, error)
                if not any(plan.has_moved for plan in self._plans):
                    raise
                self._foundations = None
                take_step(params, sharded)
            if self._release is not None:
                self._release.after_step(self)
        return loss

    _own_step = step  # without hooks

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the grads as torch does. A backward that has failed under ``release_grads`` is forgotten."""
        super().zero_grad(set_to_none)
        if self._release is not None:
            self._release.begin_anew()

    def _step(self, params: list[Tensor], sharded: bool) -> None:
        plans, grads, verdict, others = self._look(params, sharded)
        verdict = verdict if others is None else common_verdict.agree(self, params, verdict, others)
        for i, plan in enumerate(plans):  # the first plan writes the outcome
            plan_verdict = verdict if i == 0 else verdict._replace(outcome=None)
            plan.step(grads, plan_verdict, self.max_norm, None if plan_verdict.outcome is None else self._skips)
        if not plans and verdict.outcome is not None:
            write_outcome(*verdict[:4], self._skips)  # as a plan would
        if not torch.compiler.is_compiling():
            vector = verdict.outcome
            self.grad_norm = vector[0] if vector is not None and verdict.has_norm else None
            self._step_outcome.note_skip(vector)

    def _look(self, params: list[Tensor], sharded: bool) -> tuple[list[Plan], list[Any], Verdict, Processes | None]:
        """Return the plans, the grads, this process's verdict on them, and the processes that have to agree on one."""
        if (failures := self._step_outcome.failures) is not None:
            common_verdict.raise_if_one_has_failed(self, failures)
        try:
            grads = settled_grads(params) if sharded else [param.grad for param in params]
            if self._offload is not None:
                grads = self._offload.gather(self, params, grads)
            if self._is_loaded:
                self._compare_loaded()
            plans = self._plans_for(params, grads)
            return plans, grads, *found_here(self, plans, params, grads)
        except Exception:
            common_verdict.tell_failure(self, params)
            raise

    def _compare_loaded(self) -> None:
        """Bring the masters up to date with the weights, after both were loaded, and warn if they don't fit."""
        if torch.compiler.is_compiling():
            return
        if any(it.is_cuda for it in params_of(self)) and is_current_stream_capturing():
            return  # comparing waits for the device; kernels follow written weights anyway, but don't warn
        self._is_loaded = False
        masters.compare_loaded(type(self).__name__, *offloading.weights_and_states(self))

    def _follow_writes(self) -> None:
        """Bring the masters up to date with the weights, before somebody reads the state without the weights."""
        if self._offload is not None:
            self._offload.twins.follow(params_of(self))
        if not self._is_loaded:
            masters.align(*offloading.weights_and_states(self))
        if self._offload is not None:
            self._offload.twins.send_all()

    def _plans_for(self, params: list[Tensor], grads: list[Tensor | None]) -> list[Plan]:
        """Return one plan for each device. Reuse the plans of the last step if they still fit."""
        if torch.compiler.is_compiling():
            return self._new_plans(params, grads)
        # One plan's kernels check all parameters before they step any; several plans can't wait for each other.
        moved = [it.has_moved if len(self._plans) > 1 else it.first_has_moved for it in self._plans]
        known = self._foundations
        if known is None or any(moved) or not known.hold(self.param_groups, params, grads, self.state):
            self._plans = self._new_plans(params, grads)
            self._foundations = Foundations(self._rule, self.param_groups, params, grads, self.state)
        return self._plans

    def _new_plans(self, params: list[Tensor], grads: list[Tensor | None]) -> list[Plan]:
        """Return a plan for each device, of the parameters that have a grad; each of those then has a state."""
        group_options.refuse_twice(type(self).__name__, params)
        for group in self.param_groups:
            group_options.check_group(self, group)
        self._step_outcome.find_parts(params, self._peers)
        group_of = [group for group in self.param_groups for _ in group["params"]]
        places = [i for i, grad in enumerate(grads) if grad is not None]
        for i in places:
            self._state_of(params[i], grads[i], group_of[i])
        rows = [(group, param, self.state.get(param, {})) for group, param in zip(group_of, params, strict=True)]
        if self._offload is not None and any(params[i].is_cuda for i in places):
            return [self._offload.plan(self, params, rows, places, grads)]
        parts = self._step_outcome.parts
        by_devices = by_device((params[i] for i in places), places)
        return [Plan(self._rule, rows, places_there, self._ledger, parts) for places_there in by_devices.values()]

    def _state_of(self, param: Tensor, grad: Tensor | None, group: dict[str, Any]) -> dict[str, Tensor]:
        refuse_sparse(type(self).__name__, grad)
        home, known = param, self.state.get(param, {})
        if self._offload is not None:
            home, known = self._offload.placed(param, known)
        state = param_state.for_step(self._rule, type(self).__name__, home, known, group)
        if state:
            self.state[param] = state
        return state

    def overflow_report(self, model: Module | None = None, found: find_nonfinite | None = None) -> OverflowReport:
        """Return a report like ``GradScaler.overflow_report``'s, about the last step that the guard skipped."""
        has_looked = self._skips is not None
        return OverflowReport([(self, self._ledger.records())], model, found, has_looked=has_looked)

    def state_dict(self) -> dict[str, Any]:
        """Return a state dict that torch's class can load, too. 8-bit moments are decoded to fp32, without loss."""
        self._follow_writes()
        with checkpoint.saving(self):
            return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of ours or torch's, or leave everything as it is if that fails. Unlike torch, don't round
        the states to their parameter's dtype."""
        checkpoint.refuse_no_dict(f"{type(self).__name__}.load_state_dict", "state_dict", state_dict)
        with checkpoint.loading(self):
            super().load_state_dict(state_dict)

    def release_grads(self, scaler: torch.amp.GradScaler | None = None) -> GradientRelease:
        """From now on, free each grad inside the backward, so that the grads are never in memory all at once.

        The backward steps each parameter as soon as its grad is complete, and ``step`` has nothing left to do. With
        ``max_norm``, the guard or a scaler, the step needs all grads first. Grads are then kept until the step, in 16
        bits: the grads of fp32 parameters become bf16, which on CUDA only mpkernels' GradScaler accepts. If several
        backwards come before a step, run all but the last one under ``with release.accumulate():``; a second grad of a
        parameter that is stepped in the backward raises. Reentrant checkpoints' grads are kept until the step.

        With ``offload``, each grad goes to the host in the dtype that it has, and is freed on the GPU. There it waits
        for the step, under no scaler but mpkernels'. Grads of several backwards are added up there in fp32.

        DistributedDataParallel and FSDP1 would exchange grads after they are freed: under the former the first backward
        raises, under the latter this method does. ``scaler`` is the scaler that you train with, if there is one.
        """
        on_host = self._offload.arrived if self._offload and any(it.is_cuda for it in params_of(self)) else None
        releases = steps_in_backward(self, scaler, on_host)
        if self._release is not None:
            self._release.remove()
        self._release = GradientRelease(f"{type(self).__name__}.release_grads", releases, on_host)
        return self._release

    def __getstate__(self) -> dict[str, Any]:
        self._follow_writes()
        return super().__getstate__() | {key: getattr(self, key) for key in _OWN}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(checkpoint.taken_over(state))
        for group in self.param_groups:
            group_options.complete(self, group)
        group_options.leave_scaling_to_torch(self)
        self._start_afresh()


# What a pickle or a copy holds beyond torch's part.
_OWN = "master", "state_dtype", "max_norm", "guard", "offload", "grad_norm", "_skips", "_peers", "_is_loaded"
