"""Masters: fp32 weights, clipping and overflow checks around any optimizer that steps parameters in place."""

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mpkernels._torch_private.optimizers import hooks_of_loading, hooks_of_saving
from mpkernels._torch_private.sharded import is_fsdp1s
from mpkernels.distributed import meshes
from mpkernels.ops._checks import suggests_options
from mpkernels.ops.grads.grad_stats import grad_stats
from mpkernels.ops.step.op import grad_factor, write_outcome
from mpkernels.optim import group_options, masters, step_hooks, verdicts
from mpkernels.optim.engine import Engine
from mpkernels.optim.stand_ins import blank, renamed, step_group
from mpkernels.parameters import by_device, params_of, put_on, real, sum_of
from mpkernels.parts import part_for, part_of, parts_of, placed_as, settled_grads


class _OfWrapped:
    """An attribute that the wrapped optimizer has under the same name."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, optimizer: Any, kind: type | None = None) -> Any:
        return self if optimizer is None else getattr(optimizer.wrapped, self._name)

    def __set__(self, optimizer: Any, value: Any) -> None:
        setattr(optimizer.wrapped, self._name, value)


class Masters(Optimizer):
    """fp32 master weights for 16-bit parameters, around ``torch.optim.Muon`` or any optimizer that steps in place.

    >>> optimizer = Masters(torch.optim.Muon(matrices, lr=0.02), max_norm=1.0)

    Each step hands the wrapped optimizer fp32 weights and fp32 grads instead of 16-bit ones, so its states are fp32, too;
    then it rounds the weights. Between steps a parameter takes 2 bytes more for its split master, as in ``AdamW``, and
    what the optimizer keeps. During a step, weight and grad of one group at a time take 8 bytes an element more. Make
    smaller groups to lower that: with ``[{"params": [it]} for it in params]`` it is one parameter at a time.

    Parameters in fp32 and fp64 are handed over as they are. Without checks, no grad is looked at. With them, the host
    waits in each step until the device knows whether to skip it, as with torch's optimizers under torch's scaler.

    ``state``, ``param_groups`` and ``defaults`` are those of the wrapped optimizer, which is ``wrapped``. Call the step,
    zero_grad and state_dict of Masters alone. Hooks around a step of Masters run once a step; hooks of the wrapped
    optimizer run once for each group, and see fp32.

    Args:
        optimizer: the optimizer to wrap. Its step must need no closure and no other optimizer's grads: each group is
            stepped by a call of its own. ``AdamW`` of mpkernels keeps masters by itself.
        max_norm: the largest global norm of the grads. ``step`` clips them to it, as ``clip_grad_norm_`` would.
        guard: whether to skip a step whose grads hold an inf or NaN when no scaler does. None turns the guard on if
            ``max_norm`` is given or a parameter has 16 bits. A scaler always does.
    """

    #: The norm of the last step's unscaled grads, before clipping: fp32, on the device. None if the step computed none.
    grad_norm: Tensor | None = None
    #: How many steps were skipped so far because of an inf or NaN: fp32, on the device.
    skipped_steps: Tensor | None = None

    state: Any = _OfWrapped()
    param_groups: Any = _OfWrapped()
    defaults: Any = _OfWrapped()
    _peers = None  # which process_group would name

    @suggests_options
    def __init__(self, optimizer: Optimizer, *, max_norm: float | None = None, guard: bool | None = None) -> None:
        _check_kind(optimizer)
        for group in optimizer.param_groups:
            _check_group(group)
        group_options.check_global(max_norm, guard)
        self.__setstate__({"wrapped": optimizer, "max_norm": max_norm, "guard": guard})

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.wrapped = state["wrapped"]  # where torch looks for defaults
        self._is_loaded = False  # since the last step: the model may yet be loaded after it
        self._was_skipped: bool | None = None
        self._widened: Any = None  # the dict of states whose 16-bit tensors have been widened
        super().__setstate__(state)

    def __getstate__(self) -> dict[str, Any]:
        return {key: vars(self)[key] for key in _OWN if key in vars(self)}

    def __repr__(self) -> str:
        return f"{type(self).__name__} (max_norm: {self.max_norm}, guard: {self.guard}) around\n{self.wrapped!r}"

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether a scaler leaves unscaling and skipping to the step. Hooks would see scaled grads."""
        return not step_hooks.see_grads(self)

    @property
    def step_was_skipped(self) -> Tensor | None:
        """Whether the last step was skipped because of an inf or NaN: a bool, 0-dim, on the host. None if it did not
        check its grads."""
        return None if self._was_skipped is None else torch.tensor(self._was_skipped)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the wrapped optimizer."""
        self.wrapped.add_param_group(param_group)
        try:
            _check_group(self.param_groups[-1])
        except ValueError:
            self.param_groups.pop()
            raise
        self._widened = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the grads as the wrapped optimizer does."""
        self.wrapped.zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Let the wrapped optimizer step, or skip the step if the guard or a scaler finds an inf or NaN.

        Args:
            closure: a function that runs forward and backward and returns the loss. It is called once, before the
                optimizer steps. ``step`` returns its result.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            params = params_of(self)
            factor = self._look(params, settled_grads(params))
            if factor is not None:
                self._prepare(params)
                for group in list(self.param_groups):
                    step_group(self.wrapped, group, factor)
        return loss

    _own_step = step  # without hooks

    def _look(self, params: list[Tensor], grads: list[Any]) -> float | None:
        """Return what to multiply the grads by; None if the step is to be skipped."""
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        self.grad_norm = self._was_skipped = total_sumsq = None
        processes = meshes.peers_of(params)
        is_guarded = verdicts.is_guarded(self, any(map(masters.needs_master, params)), found_inf)
        places = [i for i, grad in enumerate(grads) if grad is not None]
        _refuse_sparse(params, [i for i in places if is_guarded or masters.needs_master(params[i])])
        if not (places or processes) or not (is_guarded or found_inf is not None):
            return 1.0
        if is_guarded:
            total_sumsq, found_inf = _norm(params, places, processes, found_inf)
        if processes is not None:
            sumsq_of_all, found_inf, failed, _ = processes.agree(params, total_sumsq, found_inf)
            processes.refuse_if_failed("Masters: step", failed)
            total_sumsq = sumsq_of_all if is_guarded else None
        return self._factor(grad_scale, found_inf, total_sumsq)

    def _factor(self, grad_scale: Tensor | None, found_inf: Tensor, total_sumsq: Tensor | None) -> float | None:
        """Note the outcome of the step. The host waits for the device."""
        device = found_inf.device
        outcome = torch.empty(2, dtype=torch.float32, device=device)
        none_so_far = torch.zeros((), dtype=torch.float32, device=device)
        self.skipped_steps = none_so_far if self.skipped_steps is None else put_on(device, self.skipped_steps)
        grad_scale = None if grad_scale is None else put_on(device, grad_scale)
        write_outcome(grad_scale, found_inf, total_sumsq, outcome, self.skipped_steps)
        factor = grad_factor(none_so_far, grad_scale, total_sumsq, self.max_norm or math.inf)
        self.grad_norm = None if total_sumsq is None else outcome[0]
        is_skipped, number = torch.stack([outcome[1].double(), factor]).tolist()
        self._was_skipped = is_skipped > 0
        return None if self._was_skipped else number

    def _prepare(self, params: Sequence[Tensor]) -> None:
        """Have each 16-bit parameter that is to move own a split master, and its states be fp32: a constructor may have
        made them in 16 bits, and so does torch's load_state_dict, if the wrapped optimizer's is called."""
        states = self.state
        if self._is_loaded:
            self._is_loaded = False
            masters.compare_loaded(params, states)
        if self._widened is not states:
            self._widened = states
            for param in filter(masters.needs_master, params):
                state = states.get(param, {})
                state.update({key: it.float() for key, it in state.items() if _is_narrow(key, it, param)})
        for param in params:
            masters.drop_unfit(states.get(param, {}), param)
            if param.grad is not None and masters.needs_master(param):
                masters.give(states.setdefault(param, {}), param, "split")

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state dict, which its class can load, with the remainders beside the states."""
        before, after = hooks_of_saving(self)
        for hook in before:
            hook(self)
        saved = self.wrapped.state_dict()
        saved = saved | {"state": dict(saved["state"])}
        for param, number in _numbered(self.param_groups, saved):
            if state := saved["state"].get(number):
                unfit = masters.unfit(param, state)
                state = {key: it for key, it in state.items() if key not in unfit}
                if "remainder" in state:
                    state["remainder"] = masters.saved_as(param, state["remainder"])
                saved["state"][number] = state
        for hook in after:
            changed = hook(self, saved)
            saved = saved if changed is None else changed
        return saved

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of Masters, or of the wrapped optimizer's class over weights of any dtype. Unlike torch,
        don't round the states to their parameter's dtype."""
        before, after = hooks_of_loading(self)
        for hook in before.values():
            changed = hook(self, state_dict := state_dict.copy())
            state_dict = state_dict if changed is None else changed
        states, of_params = dict(state_dict["state"]), {}
        for param, number in _numbered(self.param_groups, state_dict):
            state = states.get(number, {})
            if kept := {key: state[key] for key in masters.KEYS.values() if key in state}:
                of_params[param] = _loaded(param, number, kept)
                states[number] = {key: it for key, it in state.items() if key not in kept}
        narrow = filter(masters.needs_master, params_of(self))
        with renamed(self.wrapped, {param: blank(param) for param in narrow}):  # torch casts to these
            self.wrapped.load_state_dict(state_dict | {"state": states})
        for param, kept in of_params.items():
            self.state.setdefault(param, {}).update(kept)
        self._widened, self._is_loaded = self.state, True
        for hook in after.values():
            hook(self)


_OWN = ("wrapped", "max_norm", "guard", "grad_norm", "skipped_steps", "_was_skipped", "_is_loaded", "_widened")


def _check_kind(optimizer: Any) -> None:
    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if not isinstance(optimizer, Optimizer):
        what = "the class " if isinstance(optimizer, type) else ""
        raise TypeError(f"Masters: optimizer must be a torch.optim.Optimizer, got {what}{name}")
    if isinstance(optimizer, Engine | Masters):
        raise ValueError(f"Masters: optimizer must keep no masters by itself, got {name}, which does; use it alone")
    if any(isinstance(it, Optimizer) for it in vars(optimizer).values()):
        raise ValueError(f"Masters: optimizer must not hold another one, got {name}; put Masters around the inner one")
    _, *arguments = inspect.signature(kind.step).parameters.values()
    if any(it.default is it.empty and it.kind not in (it.VAR_POSITIONAL, it.VAR_KEYWORD) for it in arguments):
        raise ValueError(
            f"Masters: optimizer must step without a closure, got {name}, whose step evaluates the model at weights that "
            "it tries, which the model would see in 16 bits"
        )


def _check_group(group: dict[str, Any]) -> None:
    for key in ("differentiable", "gradient_release"):  # torch's, optimi's
        if group.get(key):
            raise ValueError(f"Masters: optimizer must have {key}=False, got {group[key]!r}")
    if any(map(is_fsdp1s, group["params"])):
        raise ValueError("Masters: params must not be those of FullyShardedDataParallel; use fully_shard")


def _refuse_sparse(params: Sequence[Tensor], places: Sequence[int]) -> None:
    for i in places:
        if params[i].grad.layout != torch.strided:  # type: ignore[union-attr]
            raise RuntimeError(
                f"Masters: params[{i}] of shape {tuple(params[i].shape)} must have a dense grad, got a sparse one; "
                "sparse grads are for fp32 parameters without max_norm and guard"
            )


def _norm(
    params: Sequence[Tensor], places: Sequence[int], processes: meshes.Parts | None, found_inf: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the sum of the squares of these parameters' grads in this process, and whether they hold an inf or NaN."""
    try:
        own = [params[i] for i in places]
        shares = [1.0] * len(own) if processes is None else processes.shares(own)
        grads = list(map(real, parts_of([it.grad for it in own])))
        sums, found = [], [] if found_inf is None else [found_inf]
        for device, rows in by_device(grads, range(len(grads))).items():
            stats = grad_stats([grads[i] for i in rows])
            weights = torch.tensor([shares[i] for i in rows], dtype=torch.float64, device=device)
            sums.append((stats.sumsq * weights).sum() if set(shares) != {1.0} else stats.total_sumsq)
            found.append(stats.found_inf)
    except Exception:
        if processes is not None:
            processes.agree(params, None, None, has_failed=True)
        raise
    nothing = [torch.zeros((), dtype=torch.float64)]
    return sum_of(sums or nothing), sum_of(found or nothing)


def _numbered(groups: Sequence[dict[str, Any]], saved: dict[str, Any]) -> list[tuple[Tensor, Any]]:
    """Return each parameter with its number in a state dict, whose lengths torch compares."""
    pairs = zip(groups, saved["param_groups"], strict=False)
    return [it for group, packed in pairs for it in zip(group["params"], packed["params"], strict=False)]


def _is_narrow(key: str, value: Any, param: Tensor) -> bool:
    return isinstance(value, Tensor) and value.dtype == param.dtype and key not in masters.KEYS.values()


def _loaded(param: Tensor, number: Any, saved: dict[str, Tensor]) -> dict[str, Tensor]:
    for key, value in saved.items():
        if value.shape != param.shape:
            raise ValueError(
                f"Masters.load_state_dict: state[{number!r}][{key!r}] must have its parameter's shape "
                f"{tuple(param.shape)}, got {tuple(value.shape)}"
            )
    found = masters.loaded(part_of(param), {key: part_for(param, value) for key, value in saved.items()})
    state = {key: placed_as(param, value) for key, value in found.items()}
    masters.mark(state, param)
    return state
