"""GradScaler: torch.amp.GradScaler, extended to grads of any dtype, other scalings and reports on skipped steps."""

import math
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from mpkernels._shared.parameters import put_on
from mpkernels.amp import inf_check, scalings
from mpkernels.amp.autocasting import check_device, machines_device
from mpkernels.amp.retries import AllOrNothing, Attempt
from mpkernels.amp.step_by_name import step_by_name
from mpkernels.distributed import processes
from mpkernels.ops import update_scale_
from mpkernels.ops._checks import suggests_options
from mpkernels.optim import torch_scalers
from mpkernels.optim.readback import Readback
from mpkernels.optim.skipping_optimizer import SkippingOptimizer
from mpkernels.optim.under_scaler import Notes
from mpkernels.overflow.first_nonfinite import find_nonfinite
from mpkernels.overflow.ledger import Ledgers
from mpkernels.overflow.report import OverflowReport


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` for grads of any dtype, with more kinds of scaling and a report on skipped steps.

    ``scale``, ``unscale_``, ``step`` and ``update`` never make the host wait for the device if the optimizer reads
    found_inf on the device. ``mpkernels.optim.AdamW`` does, and looks for inf and NaN inside its own step.
    ``step_was_skipped`` says whether a step was skipped, ``overflow_report`` which grads were the reason.

    Args:
        device: the type of device that you train on; None takes the machine's accelerator, or the CPU.
        init_scale: the first scale.
        growth_factor: what a dynamic scale is multiplied by when it grows.
        backoff_factor: what a dynamic scale is multiplied by after an overflow.
        growth_interval: after how many updates in a row without overflow a dynamic scale grows.
        enabled: whether to scale at all. If False, each method passes on what it is given.
        scaling: how the scale moves. ``"dynamic"`` follows torch's rule; ``"static"`` stays at init_scale. A schedule
            is a callable that takes the number of updates so far and returns a scale, or a list of (first update,
            scale). With each of them, an overflow skips the step.
        min_scale: what a dynamic scale is never below, also after ``update(new_scale)`` and a load.
        max_scale: what a dynamic scale is never above, likewise.
        hysteresis: how many overflows in a row it takes until a dynamic scale backs off. Each further overflow in the
            same row makes it back off again.
        process_group: the processes that each hold one part of the grads, as under FSDP1. If one of them finds an inf
            or NaN, all skip the step, and so their scales stay equal. If AdamW has a process_group, the scaler uses it.
    """

    _leaves_check = True  # to the optimizer's step, and not a subclass's check

    @suggests_options
    def __init__(
        self,
        device: str | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        scaling: scalings.Scaling = "dynamic",
        min_scale: float = 0.0,
        max_scale: float = math.inf,
        hysteresis: int = 1,
        process_group: Any = None,
    ) -> None:
        as_torch = init_scale, growth_factor, backoff_factor, growth_interval
        beyond = min_scale, max_scale, hysteresis
        schedule = scalings.check(scaling, dict(zip(scalings.DEFAULTS, as_torch + beyond, strict=True)), enabled)
        if enabled and device is not None:
            check_device("GradScaler", device)
        super().__init__(machines_device() if device is None else device, *as_torch, enabled)
        self._scaling = "scheduled" if schedule is not None else scaling
        self._schedule, self._updates = schedule, 0
        self._min_scale, self._max_scale, self._hysteresis = beyond
        self._init_overflows = [0, 0]  # overflows in a row, and in all
        self._overflows: Tensor | None = None
        self._was_skipped = Readback()
        self._ledgers, self._peers = Ledgers(), processes.given("GradScaler", process_group)
        if self._scaling != "dynamic":
            self._growth_factor = self._backoff_factor = 1.0
        if schedule is not None:
            self._init_scale = scalings.scale_at(schedule, 0)

    @property
    def step_was_skipped(self) -> Tensor | None:
        """Whether a step was skipped before the last update because of an inf or NaN, as a bool, 0-dim, on the host.
        Reading it never waits for the device. While the device is still busy, the answer is about an earlier update.
        None until the device has finished the first update."""
        overflows = self._was_skipped.read()
        return None if overflows is None else overflows[0] > 0

    @property
    def skipped_steps(self) -> Tensor | None:
        """How many updates came after a skipped step, as int32, 0-dim, on the device. None before the first scale.
        Each read makes a new tensor, which later updates leave alone."""
        return None if self._overflows is None else self._overflows[1].clone()

    def scale(self, outputs: Any) -> Any:
        """Scale as torch does, but wait for the copy of a device's scale to the CPU; torch reads it too early."""
        is_one = isinstance(outputs, Tensor)
        if is_one and self._enabled and self._scale is not None:
            return outputs * put_on(outputs.device, self._scale)
        if is_one or not self._enabled or not isinstance(outputs, Iterable):
            return super().scale(outputs)
        scaled = map(self.scale, outputs)
        return type(outputs)(scaled) if isinstance(outputs, list | tuple) else scaled

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        overflows = self._fill_overflows(torch.empty(2, dtype=torch.int32, device=dev))
        try:
            super()._lazy_init_scale_growth_tracker(dev)
        except BaseException:  # drop both, so that the next call makes both
            self._scale = self._growth_tracker = None
            raise
        self._overflows = overflows

    def _fill_overflows(self, overflows: Tensor) -> Tensor:
        for i, count in enumerate(self._init_overflows):
            overflows[i].fill_(count)
        return overflows

    def unscale_(self, optimizer: Optimizer) -> None:
        """Unscale as torch does. If it fails, the next call unscales only grads that are still scaled."""
        try:
            super().unscale_(optimizer)
        except BaseException:
            for attempt in self._attempts(optimizer).values():
                attempt.note_failure()
            raise

    def _attempts(self, optimizer: Optimizer) -> dict[torch.device, Attempt]:
        return Notes.among(self._per_optimizer_states.get(id(optimizer), {})).attempts  # torch adds it when it unscales

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        grads = inf_check.grads_of(optimizer)
        unscale = partial(inf_check.unscale_, grads, inv_scale, self._attempts(optimizer))  # fp16 is always allowed
        step_asks = Notes.among(self._per_optimizer_states[id(optimizer)]).step_asks
        peers = None if step_asks else inf_check.peers_of(self, optimizer)
        found_infs = inf_check.found_by_all(peers, unscale, inv_scale)
        self._note(optimizer, grads, found_infs, unscaled=True)
        return found_infs

    def _check_inf_per_device(self, optimizer: Optimizer) -> dict[Any, Tensor]:
        """Return whether the grads hold an inf or NaN. torch calls this before the step of an optimizer that unscales
        inside its step, so this only reads the grads."""
        grads, (scale, _) = inf_check.grads_of(optimizer), self._check_scale_growth_tracker("_check_inf_per_device")

        def find() -> dict[Any, Tensor]:
            found_infs: dict[Any, Tensor] = inf_check.find_inf(grads, scale)
            if type(self)._unscale_grads_ is not GradScaler._unscale_grads_:  # a subclass's may ask other ranks
                for device, found_inf in super(GradScaler, self)._check_inf_per_device(optimizer).items():
                    found_infs[device] = torch.maximum(found_inf, found_infs.get(device, found_inf))
            return found_infs

        step_asks = getattr(optimizer, "_takes_scale", False)
        found_infs = inf_check.found_by_all(inf_check.peers_of(self, optimizer), find, scale, step_asks)
        self._note(optimizer, grads, found_infs, unscaled=False)
        self._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = found_infs
        return found_infs

    def _note(self, optimizer: Optimizer, grads: inf_check.Grads, found_infs: Any, unscaled: bool) -> None:
        """Record the facts about the grads on the device, if the step will be skipped."""
        if self._scale is None:  # a subclass unscales by a scale of its own
            return
        self._ledgers.take_up(optimizer, self._overflows)
        self._ledgers.fill(optimizer, grads, found_infs, self._scale, unscaled)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Step as torch does. If the step raises, remove the attributes that the scaler has set on the optimizer."""
        self._ledgers.take_up(optimizer, self._overflows)
        if self._steps_by_name(optimizer, kwargs):
            return step_by_name(self, optimizer, self._leaves_check, args, kwargs)  # type: ignore[arg-type,no-any-return]
        attributes = getattr(optimizer, "__dict__", {})  # a class with __slots__ has none
        before = {name: attributes[name] for name in _HANDED if name in attributes}
        try:
            if not torch_scalers.is_a_wrapper(optimizer, attributes):
                return super().step(optimizer, *args, **kwargs)
            optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
            try:
                return super().step(optimizer, *args, **kwargs)
            finally:
                del optimizer._step_supports_amp_scaling  # type: ignore[attr-defined]
        except BaseException:
            for name in _HANDED:
                attributes.pop(name, None)
            attributes.update(before)
            raise

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._leaves_check = (cls._unscale_grads_, cls._check_inf_per_device) == _CHECKS

    def _steps_by_name(self, optimizer: Optimizer, kwargs: dict[str, Any]) -> bool:
        """Return whether this is an optimizer of ours that takes a scale. torch raises its errors."""
        # Its type, because a wrapper forwards attribute reads.
        if not issubclass(type(optimizer), SkippingOptimizer) or not optimizer._takes_scale:  # type: ignore[attr-defined]
            return False
        if not self._enabled or self._scale is None or "closure" in kwargs:
            return False
        state = self._per_optimizer_states.get(id(optimizer))
        return state is None or state["stage"] is not OptState.STEPPED

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Update as torch does; ``new_scale`` may be a float, an int or any tensor of one element."""
        if not self._enabled:
            return
        scale, tracker = self._check_scale_growth_tracker("update")
        found_infs = [
            put_on(scale.device, found_inf)
            for state in self._per_optimizer_states.values()
            for found_inf in state["found_inf_per_device"].values()
        ]
        if new_scale is None and not found_infs:
            raise AssertionError("No inf checks were recorded prior to update.")
        if new_scale is not None and self._schedule is not None:
            raise ValueError(f"GradScaler.update: new_scale must be None with a schedule, got {new_scale!r}")
        with AllOrNothing(scale, tracker, self._overflows):
            if new_scale is not None:
                scalings.set_to(new_scale, scale, self._min_scale, self._max_scale)
                scale, tracker = scale.clone(), tracker.clone()  # the update moves clones, and so only counts overflows
            if found_infs:
                overflows = self._overflows
                assert overflows is not None  # it is made with the scale
                found_inf = found_infs[0] if len(found_infs) == 1 else torch.stack(found_infs).sum()
                factors = self._growth_factor, self._backoff_factor, self._growth_interval
                beyond = self._min_scale, self._max_scale, self._hysteresis
                update_scale_(scale, tracker, found_inf, *factors, overflows, *beyond)
                self._ledgers.count(self._per_optimizer_states, overflows)
                self._was_skipped.send(overflows)
            if self._schedule is not None:
                scale.fill_(scalings.scale_at(self._schedule, self._updates + 1))
        self._updates += 1
        self._per_optimizer_states.clear()

    def overflow_report(
        self, model: torch.nn.Module | None = None, found: find_nonfinite | None = None
    ) -> OverflowReport:
        """Return a report on the grads of the last skipped step, parameter by parameter, for every optimizer that
        skipped it.

        The skipped step has written the facts down on the device, so the grads themselves may be freed by now. The
        call waits for the device.

        Args:
            model: the model to take the parameters' names from. Without it, the report uses the names given to the
                optimizer by ``named_parameters()``, or the group and position of each parameter.
            found: the ``found`` of ``with find_nonfinite(model) as found:``. The suggestion takes it into account.
        """
        in_a_row = None if self._overflows is None else int(self._overflows[0])
        return OverflowReport(self._ledgers.records(), model, found, in_a_row)

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state dict. Scalers with options beyond torch's add their own entries to it."""
        beyond = {name: getattr(self, f"_{name}") for name in scalings.BEYOND_TORCH}
        is_torchs = self._scaling == "dynamic" and all(scalings.DEFAULTS[name] == it for name, it in beyond.items())
        if not self._enabled or is_torchs:
            return super().state_dict()
        entries = {"scaling": self._scaling, **beyond, "updates": self._updates, "overflows": self._count_overflows()}
        return super().state_dict() | entries

    def _count_overflows(self) -> list[int]:
        return self._init_overflows if self._overflows is None else self._overflows.tolist()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of torch's scaler or ours. The kind of scaling stays what the constructor was given: from
        the state of another kind, a dynamic scaler takes the scale alone, and the others take nothing."""
        if not self._enabled:
            return
        self._ledgers = Ledgers()
        if state_dict and state_dict.get("scaling", "dynamic") != self._scaling:
            if self._scaling != "dynamic":
                return
            state_dict = self.state_dict() | {"scale": state_dict["scale"]}
        super().load_state_dict(state_dict)
        for name in (*scalings.BEYOND_TORCH, "updates"):
            setattr(self, f"_{name}", state_dict.get(name, getattr(self, f"_{name}")))
        self._init_scale = min(max(self._init_scale, self._min_scale), self._max_scale)
        if self._scale is not None:
            self._scale.fill_(self._init_scale)
        self._init_overflows = list(state_dict.get("overflows", self._count_overflows()))
        if self._overflows is not None:
            self._fill_overflows(self._overflows)

    def __getstate__(self) -> dict[str, Any]:
        portable = {"_init_overflows": self._count_overflows(), "_overflows": None, "_was_skipped": Readback()}
        return super().__getstate__() | portable


_HANDED = "grad_scale", "found_inf"  # what torch's scaler sets on an optimizer
_CHECKS = GradScaler._unscale_grads_, GradScaler._check_inf_per_device
