"""AdamW with fp32 master weights, in torch's own clothes."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.cuda import is_current_stream_capturing
from torch.nn import Module

from mpkernels.distributed import fsdp1, meshes, processes
from mpkernels.distributed.processes import Processes
from mpkernels.optim import checkpoint, group_options, masters, param_state, verdicts, zero
from mpkernels.optim.masters import needs_master
from mpkernels.optim.plan import Foundations, Plan, Verdict
from mpkernels.optim.release import GradientRelease
from mpkernels.overflow.find_nonfinite import find_nonfinite
from mpkernels.overflow.ledger import Ledger
from mpkernels.overflow.readback import Readback
from mpkernels.overflow.report import OverflowReport
from mpkernels.parameters import by_device, group_of, params_of, refuse_sparse, refuse_unserved
from mpkernels.parts import grads_of, settle_grad


class AdamW(torch.optim.AdamW):
    """``torch.optim.AdamW``, and what mixed precision needs of it.

    Every parameter's true weight is fp32. Those of bf16 and fp16 parameters are kept by the optimizer; unscaling,
    clipping and skipping happen inside the step, and the grads are read, never rewritten.

    Args:
        params, lr, betas, eps, weight_decay, amsgrad, maximize, foreach, capturable, differentiable, fused: as torch
            has them. foreach, capturable and fused change nothing here: every step is fused and capturable.
            differentiable=True takes torch's own step, for fp32 parameters alone.
        master: how the fp32 weight of a 16-bit parameter is kept: ``"split"``, a 16-bit remainder beside the
            parameter, or ``"fp32"``, a copy. Parameters in fp32 and fp64 need neither. A parameter group may have its
            own, as with torch's options.
        state_dtype: of both moments: ``torch.float32``, ``torch.bfloat16`` or ``torch.int8``, a byte each with
            an fp32 scale for 256 of them (csrc/adamw/int8.h states the error). fp64 and complex parameters keep full
            moments. A group may have its own.
        max_norm: clips the global norm of the grads inside the step, as ``clip_grad_norm_`` would.
        guard: skips a step whose grads hold an inf or NaN, also without a scaler. None: on where ``max_norm`` or
            ``process_group`` is given or a parameter has 16 bits. A scaler skips such steps, whatever guard is.
        process_group: of processes that hold a part of the grads each, as under FSDP1: they clip by the norm of all,
            and skip together. Not for DistributedDataParallel, where each process has all of them.
    """

    #: fp32, 0-dim, on the device: the norm of the last step's unscaled grads; None where nothing asked for it
    grad_norm: Tensor | None = None
    #: fp32, 0-dim, on the device: steps that an inf or NaN has cost so far
    skipped_steps: Tensor | None = None

    _step_supports_amp_scaling = processes.TakesScale()  # torch's GradScaler hands over its scale and found_inf
    _finds_inf = True  # ours hands over its scale and `outcome`, where it then reads whether a step was skipped
    _peers: Processes | None = None  # that hold other parts of the grads
    _parts: meshes.Parts | None = None  # the processes that hold the other parts of DTensors
    _scaler: torch.amp.GradScaler | None = None  # that asks whether it may hand over
    _release: GradientRelease | None = None
    _is_loaded = False  # since the last step: the model may yet be loaded after it

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        master: str = "split",
        state_dtype: torch.dtype = torch.float32,
        max_norm: float | None = None,
        guard: bool | None = None,
        process_group: Any = None,
    ) -> None:
        group_options.check_global(max_norm, guard)
        self.master, self.state_dtype, self.max_norm, self.guard = master, state_dtype, max_norm, guard
        self._peers = processes.given("AdamW", process_group)
        zero.follow()
        self._start_afresh()
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
        )
        group_options.leave_scaling_to_torch(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group_options.complete(self, group)
        try:
            group_options.check_group(self, group)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    def __repr__(self) -> str:
        name, rest = super().__repr__().split("\n", 1)
        group = None if self._peers is None else self._peers.group
        return f"{name}\nmax_norm: {self.max_norm}, guard: {self.guard}, process_group: {group}\n{rest}"

    def _start_afresh(self) -> None:
        """Forgets what follows from the parameters and their states."""
        self._plans: list[Plan] = []
        self._foundations: Foundations | None = None
        self._was_skipped = Readback()
        self._ledger = Ledger()

    @property
    def step_was_skipped(self) -> Tensor | None:
        """A bool, 0-dim, on the host: whether an inf or NaN has cost the last step that the device has come to the end
        of. To ask waits for nothing. None as long as nothing is known, and where the last step has not looked. A
        step under torch.compile doesn't tell, nor does it set grad_norm and skipped_steps: torch keeps no attribute
        that such a step sets."""
        return None if (skipped := self._was_skipped.read()) is None else skipped > 0

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if self.defaults["differentiable"]:
            theirs = super().step.__func__  # type: ignore[attr-defined]
            return (theirs.__wrapped__ if hasattr(theirs, "hooked") else theirs)(self, closure)  # our hooks have run
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            try:
                self._step()
            except (RuntimeError, TypeError) as error:
                for param in params_of(self):
                    refuse_sparse(param.grad)
                if isinstance(error, NotImplementedError):
                    refuse_unserved("AdamW", "params", params_of(self))
                if not any(plan.has_moved for plan in self._plans):
                    raise
                self._foundations = None
                self._step()
            if self._release is not None:
                self._release.after_step()
        return loss

    def _step(self) -> None:
        params = params_of(self)
        grads = grads_of(params)
        self._compare_loaded()
        plans = self._plans_for(params, grads)
        verdict = verdicts.on(self, plans, params, grads)
        for i, plan in enumerate(plans):
            if i == 0:
                skipped_steps = None if verdict.outcome is None else self.skipped_steps
                plan.step(grads, verdict, self.max_norm, skipped_steps)
            else:
                plan.step(grads, verdict._replace(outcome=None), self.max_norm)
        if torch.compiler.is_compiling():
            return
        self.grad_norm = verdict.outcome[0] if verdict.outcome is not None and verdict.has_norm else None
        if verdict.outcome is None:
            self._was_skipped.forget()
        else:
            self._was_skipped.send(verdict.outcome[1])

    def _compare_loaded(self) -> None:
        if not self._is_loaded or torch.compiler.is_compiling():
            return
        params = params_of(self)
        if any(it.is_cuda for it in params) and is_current_stream_capturing():
            return  # to compare waits for the device; kernels take up what was written all the same, without a word
        self._is_loaded = False
        masters.compare_loaded(params, self.state)

    def _follow_writes(self) -> None:
        """For readers of the state who know nothing of the weights."""
        if not self._is_loaded:
            masters.align(params_of(self), self.state)

    def _plans_for(self, params: list[Tensor], grads: list[Tensor | None]) -> list[Plan]:
        """Return one for each device: those of the last step, if they hold."""
        if torch.compiler.is_compiling():
            return self._new_plans(params, grads)
        # One plan's kernels look at all its parameters before any moves; several can't wait for each other.
        moved = [it.has_moved if len(self._plans) > 1 else it.first_has_moved for it in self._plans]
        known = self._foundations
        if known is None or any(moved) or not known.hold(self.param_groups, params, grads, self.state):
            self._plans = self._new_plans(params, grads)
            self._foundations = Foundations(self.param_groups, params, grads, self.state)
        return self._plans

    def _new_plans(self, params: list[Tensor], grads: list[Tensor | None]) -> list[Plan]:
        """Return a plan for each device, of the parameters that have a grad; each of those then has a state."""
        self._parts = meshes.peers_of(params, None if self._peers is None else self._peers.group)
        self._has_parts = self._parts is not None or fsdp1.has_parts(params)
        group_of = [group for group in self.param_groups for _ in group["params"]]
        places = [i for i, grad in enumerate(grads) if grad is not None]
        for i in places:
            self._state_of(params[i], grads[i], group_of[i])
        rows = [(group, param, self.state.get(param, {})) for group, param in zip(group_of, params, strict=True)]
        of_devices = by_device((params[i] for i in places), places).values()
        return [Plan(rows, it, self._ledger, self._parts) for it in of_devices]

    def _state_of(self, param: Tensor, grad: Tensor | None, group: dict[str, Any]) -> dict[str, Tensor]:
        refuse_sparse(grad)
        if not self.state[param]:
            self.state[param] = param_state.create(param, group["master"], group["state_dtype"], group["amsgrad"])
        state: dict[str, Tensor] = self.state[param]
        if param_state.lacks_codes(param, state, group["state_dtype"]):
            state = self.state[param] = param_state.adopt(param, state, group, group["state_dtype"])
        masters.give(state, param, group["master"])  # the model may have turned 16-bit meanwhile
        state["step"] = state["step"].to(torch.float32)  # which a user may have set
        return state

    def overflow_report(self, model: Module | None = None, found: find_nonfinite | None = None) -> OverflowReport:
        """Return what ``GradScaler.overflow_report`` does, also without a scaler: on the guard's skips."""
        return OverflowReport([(self, self._ledger.records())], model, found)

    def state_dict(self) -> dict[str, Any]:
        """Return torch's, which torch's AdamW can load: 8-bit moments come in fp32, decoded exactly."""
        self._follow_writes()
        with checkpoint.saving(self):
            return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as torch does, but round no state to its parameter's dtype on the way."""
        with checkpoint.loading(self):
            super().load_state_dict(state_dict)

    def release_grads(self, scaler: torch.amp.GradScaler | None = None) -> GradientRelease:
        """Free grads inside the backward from now on, so that they never are in memory all at once.

        A parameter is stepped as soon as its grad is complete; ``step`` has nothing left to do. Where a step must first
        know all the grads (``max_norm``, the guard, a ``scaler``, which has to be named here), they are kept until then
        in 16 bits: those of fp32 parameters as bf16, which on CUDA takes our GradScaler. With several backwards before
        a step, all but the last go under ``with release.accumulate():``. Not with DistributedDataParallel, which sums
        up grads later: the first backward then raises, as this does with FSDP.
        """
        if self.defaults["differentiable"]:
            raise ValueError("AdamW: release_grads needs differentiable=False")
        is_guarded = verdicts.is_guarded(self, any(map(needs_master, params_of(self))))
        waits = is_guarded or (scaler is not None and scaler.is_enabled())
        if self._release is not None:
            self._release.remove()
        self._release = GradientRelease(
            (param, None if waits else partial(self._step_alone, i, j))
            for i, group in enumerate(self.param_groups)
            for j, param in enumerate(group["params"])
            if param.requires_grad
        )
        return self._release

    @torch.no_grad()
    def _step_alone(self, group_number: int, place: int, param: Tensor) -> None:
        group, grad = group_of(self, param, group_number, place), settle_grad(param)
        if group is None or grad is None:
            return
        self._compare_loaded()
        plan = Plan([(group, param, self._state_of(param, grad, group))], [0], is_for_once=True)
        plan.step([grad], Verdict())
        param.grad = None

    def __getstate__(self) -> dict[str, Any]:
        self._follow_writes()
        return super().__getstate__() | {key: self.__dict__[key] for key in _OWN if key in self.__dict__}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        for group in self.param_groups:
            group_options.complete(self, group)
        group_options.leave_scaling_to_torch(self)
        self._start_afresh()


_OWN = ("master", "state_dtype", "max_norm", "guard", "_peers", "grad_norm", "skipped_steps", "_is_loaded")
