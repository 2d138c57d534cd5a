"""What each optimizer of ours does in a step: look at the grads, agree with other processes, step or skip, note it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.nn import Module

from mpkernels._shared.parameters import are_any_sharded, params_of, put_on, sum_of
from mpkernels.distributed.parts import settled_grads
from mpkernels.distributed.processes import Processes
from mpkernels.ops.step.skip_and_clip import write_outcome
from mpkernels.optim import step_hooks, torch_scalers
from mpkernels.optim.agreement import Agreement, EarlyAnswer
from mpkernels.optim.gradient_release import GradientRelease, releases_in_backward
from mpkernels.optim.masters import needs_master
from mpkernels.optim.offload.grads import HostGrads
from mpkernels.optim.readback import Readback
from mpkernels.optim.step_plan import BeforeStep, StepPlan, Verdict
from mpkernels.optim.under_scaler import NOTHING, Handed, Notes
from mpkernels.overflow.first_nonfinite import find_nonfinite
from mpkernels.overflow.ledger import Ledger
from mpkernels.overflow.report import OverflowReport


class SkippingOptimizer(torch.optim.Optimizer):
    """An optimizer that looks at its grads in a step, and skips the step if one holds an inf or NaN. A class that
    inherits from this makes the plans that look and step."""

    #: The norm of the last step's unscaled grads, before clipping: fp32, on the device. None if the step computed none.
    #: A compiled step doesn't set it (see ``step_was_skipped``).
    grad_norm: Tensor | None = None
    max_norm: float | None
    guard: bool | None

    _step_supports_amp_scaling = torch_scalers.TakesScale()  # torch's GradScaler hands over its scale and found_inf
    _takes_scale = True  # our GradScaler hands over its scale and a vector, from which it reads the skip
    _peers: Processes | None = None  # the processes that hold other parts of the grads
    _handed: Handed | None = None  # by our scaler, during a step under it
    _scaler: torch.amp.GradScaler | None = None  # the scaler that last asked whether it may hand its scale over
    _release: GradientRelease | None = None
    _skips: Tensor | None = None  # the count that the kernels write, behind skipped_steps

    def _forget_steps(self) -> None:
        """Begin anew, as an optimizer that has taken no step yet."""
        self._agreement, self._newest_skip, self._ledger = Agreement(type(self).__name__), Readback(), Ledger()

    @property
    def step_was_skipped(self) -> Tensor | None:
        """Whether the newest step that the device has finished was skipped because of an inf or NaN.

        A bool, 0-dim, on the host. Reading it never waits for the device. None if no step has finished yet, or if the
        last step did not check its grads. A compiled step sets neither this nor grad_norm, because torch.compile drops
        the attributes that a step sets: they still tell of the last step that was not compiled. It counts skipped_steps
        if such a step has begun the count.
        """
        skipped = self._newest_skip.read()
        return None if skipped is None else skipped > 0

    @property
    def skipped_steps(self) -> Tensor | None:
        """How many steps were skipped so far because of an inf or NaN: fp32, on the device. None if no step has checked
        its grads. Each read makes a new tensor, which later steps leave alone."""
        return None if self._skips is None else self._skips.clone()

    @skipped_steps.setter
    def skipped_steps(self, skips: Tensor | None) -> None:
        self._skips = None if skips is None else skips.clone()

    def overflow_report(self, model: Module | None = None, found: find_nonfinite | None = None) -> OverflowReport:
        """Return a report like ``GradScaler.overflow_report``'s, about the last step that the guard skipped."""
        has_looked = self._skips is not None
        return OverflowReport([(self, self._ledger.records())], model, found, has_looked=has_looked)

    def release_grads(self, scaler: torch.amp.GradScaler | None = None) -> GradientRelease:
        """From now on, free each grad inside the backward, so that the grads are never in memory all at once.

        The backward steps each parameter as soon as its grad is complete, and ``step`` has nothing left to do. With
        ``max_norm``, the guard or a scaler, the step needs all grads first. Grads are then kept until the step, in 16
        bits: the grads of fp32 parameters become bf16, which on CUDA only mpkernels' GradScaler accepts. If several
        backwards come before a step, run all but the last one under ``with release.accumulate():``; a second grad of a
        parameter that is stepped in the backward raises. Reentrant checkpoints' grads are kept until the step.

        With ``offload``, which Masters lacks, each grad goes to the host in the dtype that it has, and is freed on the
        GPU. There it waits for the step, under no scaler but mpkernels'. Grads of several backwards are added up there
        in fp32.

        DistributedDataParallel and FSDP1 would exchange grads after they are freed: under the former the first backward
        raises, under the latter this method does. ``scaler`` is the scaler that you train with, if there is one.
        """
        on_host = self._host_for_grads()
        releases = releases_in_backward(self, scaler, on_host)
        if self._release is not None:
            self._release.remove()
        self._release = GradientRelease(f"{type(self).__name__}.release_grads", releases, on_host)
        return self._release

    def _host_for_grads(self) -> HostGrads | None:
        """Return where grads go on the host, if they are to."""
        return None

    def refuse_to_step_alone(self) -> None:
        """Raise if parameters can't be stepped one by one."""

    def step_alone(self, group_number: int, place: int, param: Tensor) -> None:
        """Step this parameter, and drop its grad. Its group and place in that are where it was once."""
        raise NotImplementedError

    def step_scaled(self, handed: Handed, *args: Any, **kwargs: Any) -> Any:
        """Step under our scaler, with what it hands over."""
        self._handed = handed
        try:
            result = self.step(*args, **kwargs)  # the instance's, which schedulers, Accelerate and torch.compile set
        finally:
            self._handed = None
        for name in ("grad_scale", "found_inf"):  # of the user, or left by another scaler: torch deletes them, too
            vars(self).pop(name, None)
        return result

    def _plans_for(self, params: list[Tensor], grads: list[Any]) -> tuple[Sequence[StepPlan], list[Any]]:
        """Return plans that together step the parameters that have a grad, and the grads as they take them."""
        raise NotImplementedError

    def _forget_plans(self) -> None:
        """Have the next step make plans anew, and a step that has failed not be tried again."""
        raise NotImplementedError

    def is_guarded(self, has_16_bit_parameters: bool, handed: Handed = NOTHING) -> bool:
        """Return whether a step checks its grads. If a scaler has checked them, it need not."""
        if self.max_norm is not None or self.guard or handed.outcome is not None:
            return True
        on_by_itself = has_16_bit_parameters or self._peers is not None  # peers may have 16-bit parameters
        return self.guard is None and handed.found_inf is None and on_by_itself

    def _shown_guard(self) -> str:
        """Return the option, and whether the guard is on where the option leaves that to the optimizer."""
        if self.guard is not None:
            return str(self.guard)
        return f"None ({'on' if self.is_guarded(any(map(needs_master, params_of(self)))) else 'off'})"

    def _step(self, params: list[Tensor], sharded: bool) -> None:
        handed = self.handed_over() if self._handed is None else self._handed
        plans, grads, verdict, processes, has_stepped = self._look_at_grads(params, sharded, handed, may_step=True)
        if processes is not None:
            verdict = self._agreement.answer(params, verdict, processes, handed.found_inf is not None)
            if handed.scaler is not None and verdict.found_inf is not None:
                torch_scalers.hand_back(handed.scaler, self, verdict.found_inf)
            self._scaler = None
        is_skipped, vector = None, verdict.outcome
        for i, plan in enumerate(() if has_stepped else plans):
            if i == 0:  # the first plan writes the outcome
                is_skipped = plan.step(grads, verdict, self.max_norm, None if vector is None else self._skips)
            else:
                plan.step(grads, verdict._replace(outcome=None), self.max_norm)
        if not plans and vector is not None:
            write_outcome(*verdict[:4], self._skips)  # as a plan would
        if not torch.compiler.is_compiling():
            self.grad_norm = vector[0] if vector is not None and verdict.has_norm else None
            if vector is None:
                self._newest_skip.forget()
            else:
                self._newest_skip.send(vector[1] if is_skipped is None else torch.tensor(float(is_skipped)))

    def handed_over(self) -> Handed:
        """Return what the scaler that this step is under has handed over."""
        if self._handed is not None:
            return self._handed
        return torch_scalers.handed_over(self, self._scaler)

    def _look_at_grads(self, params: list[Tensor], sharded: bool, handed: Handed, may_step: bool = False) -> BeforeStep:
        """Look at the grads, if the step checks them. With ``may_step``, a single plan that looks and steps in one call
        does so."""
        if self._agreement.failures is not None:
            self._agreement.raise_if_one_has_failed()
        try:
            grads: list[Any] = settled_grads(params) if sharded else [param.grad for param in params]
            plans, grads = self._plans_for(params, grads)
            guarded, processes = self._deciders(plans, params, handed)
            is_idle = processes is None and not any(plan.has_grads for plan in plans)
            if is_idle or not (guarded or handed.found_inf is not None):
                return BeforeStep(plans, grads, Verdict(handed.grad_scale))
            device = plans[0].device if plans or processes is None else processes.device_of(params)
            if not torch.compiler.is_compiling():
                if self._skips is None:
                    self._skips = torch.zeros((), dtype=torch.float32, device=device)
                self._skips = put_on(device, self._skips)
            vector = torch.empty(2, dtype=torch.float32, device=device) if handed.outcome is None else handed.outcome
            found_inf = handed.found_inf
            if found_inf is not None and not isinstance(found_inf, Tensor):  # 0, of a scaler that has seen no grads
                found_inf = torch.zeros((), dtype=torch.float32, device=device)
            verdict = Verdict(handed.grad_scale, found_inf, None, vector, guarded)
            is_one = may_step and guarded and processes is None and len(plans) == 1
            if is_one and plans[0].look_and_step(grads, verdict, self.max_norm, self._skips):
                return BeforeStep(plans, grads, verdict, has_stepped=True)
            verdict = _over_all_plans(plans, params, grads, verdict) if guarded else verdict
            return BeforeStep(plans, grads, verdict, processes)
        except Exception:
            self._tell_failure(params, handed)
            raise

    def _deciders(
        self, plans: Sequence[StepPlan], params: Sequence[Tensor], handed: Handed
    ) -> tuple[bool, Processes | None]:
        """Return whether the step checks its grads, and the processes that decide with it."""
        agreement, has_16_bits = self._agreement, any(plan.has_16_bit_parameters for plan in plans)
        # A process without grads decides as the others do.
        guarded = self.is_guarded(agreement.has_16_bit_parameters if agreement.has_parts else has_16_bits, handed)
        if not guarded and handed.found_inf is None:
            return False, None
        found = self._peers
        if agreement.has_parts:
            found = agreement.holders(params, self._peers, self.max_norm is not None)
        return guarded, found or handed.peers

    def _tell_failure(self, params: Sequence[Tensor], handed: Handed) -> None:
        """Tell the processes that wait for this one's verdict that it has none, so that they don't step either."""
        self._agreement.find_parts(params, self._peers)  # if the step has not come so far
        _, processes = self._deciders((), params, handed)
        if processes is not None:
            self._forget_plans()
            processes.agree(params, None, None, has_failed=True)

    def settle_before_hooks(self, scaler: Any) -> bool:
        """Unscale the grads before hooks see them, unless the user has, and return whether those of all processes are
        finite. If they aren't, this writes the outcome of a skipped step, because the scaler won't call ``step``. The
        host waits for the device."""
        params, state = params_of(self), scaler._per_optimizer_states[id(self)]
        notes = Notes.among(state)
        step_hooks.refuse_capture(type(self).__name__, params)
        self._agreement.find_parts(params, self._peers)
        peers = torch_scalers.processes_of(scaler)
        processes = self._agreement.holders(params, self._peers, self.max_norm is not None) or peers
        is_ready = state["stage"] is OptState.READY
        if notes.step_unscales is None:
            notes.step_unscales = is_ready
        notes.step_asks, self._agreement.early = processes is not None, None
        if is_ready:
            try:
                torch_scalers.unscale(scaler, self, state)
            except Exception:
                if processes is not None:
                    processes.agree(params, None, None, has_failed=True)
                raise
        found_infs = list(state["found_inf_per_device"].values())
        handed = Handed(None, sum_of(found_infs).clamp(max=1) if found_infs else 0.0, peers, scaler=scaler)
        if processes is not None:
            found_inf = self._found_by_all(params, handed, scaler, notes.step_unscales)
            handed = handed._replace(found_inf=found_inf)
            torch_scalers.hand_back(scaler, self, found_inf)
        if float(handed.found_inf) == 0:
            return True
        if not notes.skip_is_taken:
            self._handed = handed
            try:
                self.our_step.__wrapped__(self)  # without hooks
            finally:
                self._handed = None
            notes.skip_is_taken = True
            step_hooks.tell_of_skip(self)
        return False

    @torch.no_grad()
    def _found_by_all(self, params: list[Tensor], handed: Handed, scaler: Any, are_scaled: bool) -> Tensor:
        """Agree with the other processes now, not in the step; those without hooks agree in the step, as often.
        are_scaled: whether grads still contain the loss scale where their norm is exchanged."""
        device = params[0].device if params else torch.device("cpu")
        if are_scaled and getattr(scaler, "_leaves_check", False):  # then the others exchange it without max_norm, too
            handed = handed._replace(outcome=torch.empty(2, dtype=torch.float32, device=device))
        _, _, here, processes, _ = self._look_at_grads(params, are_any_sharded(params), handed)
        assert processes is not None  # the caller found them
        unit = put_on(device, scaler._scale).double().square() if are_scaled else torch.ones((), dtype=torch.float64)
        as_scaled = here if here.total_sumsq is None else here._replace(total_sumsq=here.total_sumsq * unit)
        has_norm = self.max_norm is not None or self.guard is True
        may_change = has_norm and step_hooks.may_change_grads(self)
        found_inf, sumsq_of_all, changing = self._agreement.ask(params, as_scaled, processes, may_change)
        self._agreement.early = EarlyAnswer(
            found_inf,
            here.total_sumsq,
            None if sumsq_of_all is None else sumsq_of_all / unit,
            may_change and changing.item() == processes.size(),
        )
        return found_inf

    our_step: Any  # the class's step, which a subclass may replace


def _over_all_plans(plans: Sequence[StepPlan], params: Sequence[Tensor], grads: list[Any], known: Verdict) -> Verdict:
    """Return what is known with the sum of squares and found_inf over all devices. The latter includes the found_inf of
    a scaler."""
    if not plans:
        nothing = torch.zeros((), dtype=torch.float64, device=params[0].device if params else "cpu")
        return known._replace(total_sumsq=nothing)
    sums, found_infs = map(list, zip(*(plan.look(grads) for plan in plans), strict=True))
    found_inf = sum_of(found_infs if known.found_inf is None else [*found_infs, known.found_inf])
    return known._replace(total_sumsq=sum_of(sums), found_inf=found_inf)
