"""What all optimizers of this room do: masters, clipping, checks, the step itself, checkpoints. It names no rule."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.cuda import is_current_stream_capturing

from mpkernels._shared.dtypes import dtype_of
from mpkernels._shared.parameters import are_any_sharded, by_device, group_of, params_of, refuse_sparse
from mpkernels._torch_private.tracing import as_written, may_be_compiled
from mpkernels.distributed import processes
from mpkernels.distributed.parts import settled_grads
from mpkernels.optim import checkpoint, group_options, masters, param_state, torchao_offload, zero_redundancy
from mpkernels.optim import offload as offloading
from mpkernels.optim.agreement import OtherFailedError
from mpkernels.optim.gradient_release import end_earlier_releases
from mpkernels.optim.offload.grads import HostGrads
from mpkernels.optim.optimizer_rule import OptimizerRule
from mpkernels.optim.plan import Foundations, Plan
from mpkernels.optim.skipping_optimizer import SkippingOptimizer
from mpkernels.optim.step_hooks import with_hooks
from mpkernels.optim.step_plan import Verdict


class Engine(SkippingOptimizer):
    """The optimizers' common part: rules, states and plans. A class that inherits from this and from one of torch's
    adds a constructor and ``_rule``."""

    _rule: OptimizerRule
    _plan: Any = Plan
    offload: bool | str = False
    _offload: offloading.Offload | None = None
    _is_loaded = False  # whether states were loaded since the last step; the model may be loaded later

    def _take_options(
        self, master: str, state_dtype: Any, max_norm: Any, guard: Any, process_group: Any, offload: Any = False,
        **numbers: Any,
    ) -> None:  # fmt: skip
        """Check and keep the options beyond torch's, and check its numbers, before torch's constructor."""
        group_options.check_numbers(type(self).__name__, numbers)
        offload = group_options.offload_of(type(self).__name__, offload)
        group_options.check_global(type(self).__name__, max_norm, guard)
        self.master, self.state_dtype, self.max_norm, self.guard = master, dtype_of(state_dtype), max_norm, guard
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
        offload = f", offload: {self.offload}" if self.offload else ""
        guard = self._shown_guard()
        return f"{name}\nmax_norm: {self.max_norm}, guard: {guard}, process_group: {group}{offload}\n{rest}"

    @property
    def state(self) -> Any:
        """The states. Reading this waits for those that are on their way to the host."""
        if self._offload is not None:
            self._offload.wait()
        return vars(self)["state"]

    @state.setter
    def state(self, states: Any) -> None:
        vars(self)["state"] = states

    def _start_afresh(self) -> None:
        """Forget everything that was derived from the parameters and their states."""
        self._forget_plans()
        if self.offload and self._offload is None:
            self._offload = offloading.offloaded(self.offload)
        self._forget_steps()

    def _forget_plans(self) -> None:
        """Have the next step make plans anew, and a step that has failed not be tried again."""
        self._plans: list[Plan] = []
        self._foundations: Foundations | None = None

    @with_hooks
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
                # If a parameter has moved unseen, no plan has stepped: make plans anew, and try again.
                if isinstance(error, OtherFailedError) or not any(plan.has_moved for plan in self._plans):
                    raise
                self._foundations = None
                take_step(params, sharded)
            if self._release is not None:
                self._release.after_step(self)
        return loss

    our_step = step

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the grads as torch does. A backward that has failed under ``release_grads`` is forgotten."""
        super().zero_grad(set_to_none)
        if self._release is not None:
            self._release.begin_anew()

    def _compare_loaded(self) -> None:
        """Bring the masters up to date with the weights, after both were loaded, and warn if they don't fit."""
        if torch.compiler.is_compiling():
            return
        if any(param.is_cuda for param in params_of(self)) and is_current_stream_capturing():
            return  # comparing waits for the device; kernels follow written weights anyway, but don't warn
        self._is_loaded = False
        masters.compare_loaded(type(self).__name__, offloading.weights_and_masters(self))

    def _follow_writes(self) -> None:
        """Bring the masters up to date with the weights, before somebody reads the state without the weights."""
        if self._offload is not None:
            self._offload.begin_reading(params_of(self))
        if not self._is_loaded:
            masters.align(offloading.weights_and_masters(self))
        if self._offload is not None:
            self._offload.settle()

    def _plans_for(self, params: list[Tensor], grads: list[Tensor | None]) -> tuple[list[Plan], list[Any]]:
        """Return one plan for each device, and the grads, some of which may have come to the host. Reuse the plans of
        the last step if they still fit."""
        if self._offload is not None:
            grads = self._offload.gather(self, params, grads)
        if self._is_loaded:
            self._compare_loaded()
        if torch.compiler.is_compiling():
            return self._new_plans(params, grads), grads
        # One plan's kernels check all parameters before they step any; several plans can't wait for each other.
        moved = [plan.has_moved if len(self._plans) > 1 else plan.first_has_moved for plan in self._plans]
        known, states = self._foundations, vars(self)["state"]  # which may still be on their way to the host
        if known is None or any(moved) or not known.hold(self.param_groups, params, grads, states):
            self._plans = self._new_plans(params, grads)
            self._foundations = Foundations(self._rule, self.param_groups, params, grads, states)
        return self._plans, grads

    def _new_plans(self, params: list[Tensor], grads: list[Tensor | None]) -> list[Plan]:
        """Return a plan for each device, of the parameters that have a grad; each of those then has a state."""
        group_options.refuse_twice(type(self).__name__, params)
        for group in self.param_groups:
            group_options.complete(self, group)
            group_options.check_group(self, group)
        self._agreement.find_parts(params, self._peers)
        group_of = [group for group in self.param_groups for _ in group["params"]]
        places = [i for i, grad in enumerate(grads) if grad is not None]
        for i in places:
            self._state_of(params[i], grads[i], group_of[i])
        states = vars(self)["state"]
        rows = [(group, param, states.get(param, {})) for group, param in zip(group_of, params, strict=True)]
        if self._offload is not None and any(params[i].is_cuda for i in places):
            return self._offload.plans(self, params, rows, places, grads)
        parts = self._agreement.parts
        by_devices = by_device((params[i] for i in places), places)
        return [self._plan(self._rule, rows, places_there, self._ledger, parts) for places_there in by_devices.values()]

    def _state_of(self, param: Tensor, grad: Tensor | None, group: dict[str, Any]) -> dict[str, Tensor]:
        refuse_sparse(type(self).__name__, grad)
        states = vars(self)["state"]
        known = states.get(param, {})
        if self._offload is not None and self._offload.is_ready(self, param, known, group):
            return known  # type: ignore[no-any-return]
        with offloading.home_of(self, param) as home:
            known = offloading.beside(home, known)
            state = param_state.for_step(self._rule, type(self).__name__, home, known, group)
        if state:
            states[param] = state
        return state

    def state_dict(self) -> dict[str, Any]:
        """Return a state dict that torch's class can load, too. 8-bit moments are decoded to fp32, without loss."""
        self._follow_writes()
        with checkpoint.saving(self):
            return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of ours or torch's, or leave everything as it is if that fails. Unlike torch, don't round
        the states to their parameter's dtype."""
        checkpoint.refuse_no_dict(f"{type(self).__name__}.load_state_dict", "state_dict", state_dict)
        if self._offload is not None:
            self._offload.wait()  # the dict may hold our own states
        with checkpoint.loading(self):
            super().load_state_dict(state_dict)

    def _host_for_grads(self) -> HostGrads | None:
        if self.offload == "stream":
            raise ValueError(
                f"{type(self).__name__}: release_grads goes with offload=True, got 'stream', whose step needs all "
                "grads on the GPU"
            )
        return self._offload.arrived if self._offload and any(param.is_cuda for param in params_of(self)) else None

    @torch.no_grad()
    def step_alone(self, group_number: int, place: int, param: Tensor) -> None:
        group, (grad,) = group_of(self, param, group_number, place), settled_grads([param])
        if group is None or grad is None:
            return
        if self._is_loaded:
            self._compare_loaded()
        plan = self._plan(self._rule, [(group, param, self._state_of(param, grad, group))], [0], is_for_once=True)
        try:
            plan.step([grad], Verdict())
        except (RuntimeError, TypeError, ValueError) as error:
            group_options.name_cause(self, [], error)
            raise
        param.grad = None

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
