"""Masters: fp32 weights, clipping and overflow checks around any optimizer that steps parameters in place."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mpkernels._shared.parameters import are_any_sharded, group_of, params_of
from mpkernels._torch_private.optimizers import hooks_of_loading, hooks_of_saving
from mpkernels._torch_private.tracing import as_written, may_be_compiled
from mpkernels.distributed import processes
from mpkernels.distributed.parts import part_for, settled_grads
from mpkernels.ops._checks import suggests_options
from mpkernels.optim import checkpoint, group_options, masters, torchao_offload, wrappable
from mpkernels.optim.gradient_release import end_earlier_releases
from mpkernels.optim.skipping_optimizer import SkippingOptimizer
from mpkernels.optim.step_hooks import with_hooks
from mpkernels.optim.wide_weights import WideWeights
from mpkernels.optim.wrapped_plan import WrappedPlan
from mpkernels.overflow.ledger import Ledger


def _of_wrapped(name: str) -> Any:
    """Return an attribute of Masters that is one of the wrapped optimizer's."""
    return property(lambda self: getattr(self.wrapped, name), lambda self, value: setattr(self.wrapped, name, value))


class Masters(SkippingOptimizer):
    """fp32 master weights for 16-bit parameters, around ``torch.optim.Muon`` or any optimizer that steps in place.

    >>> optimizer = Masters(torch.optim.Muon(matrices, lr=0.02), max_norm=1.0)

    Each step hands fp32 weights and grads to the wrapped optimizer, which so keeps its states in fp32, and then rounds
    the weights. Between steps, a 16-bit parameter takes 2 bytes an element for its split master, besides those states.
    During a step, the fp32 weights and grads of all parameters take 8 more, or those of one group at a time with
    ``group_by_group``: groups of one parameter each, ``[{"params": [it]} for it in params]``, then take least.

    Parameters in fp32 and fp64 are handed over as they are, with grads that are unscaled and clipped. If a step checks
    its grads, the host waits until the device knows the result.

    ``state``, ``param_groups`` and ``defaults`` are those of the wrapped optimizer, ``wrapped``. LR schedulers take
    either of the two. Call ``step``, ``state_dict`` and ``load_state_dict`` of Masters alone. Hooks around the step of
    the wrapped optimizer see fp32.

    Args:
        optimizer: the optimizer to wrap. It must step without a closure, and find its parameters in ``param_groups``.
            ``mpkernels.optim.AdamW`` is refused, because it has masters.
        max_norm: the largest global norm of the grads. ``step`` clips them to it, as ``clip_grad_norm_`` would.
        guard: whether to skip a step whose grads hold an inf or NaN when no scaler does. None turns the guard on if
            ``max_norm`` is given or a parameter has 16 bits. A scaler always does.
        group_by_group: whether the wrapped optimizer steps its groups one after the other, in a call each. That saves
            memory, and takes a class that keeps no numbers of its own from step to step but in ``state`` and in groups.
        process_group: the processes that each hold one part of the grads, as with ``mpkernels.optim.AdamW``.
    """

    state: Any = _of_wrapped("state")
    param_groups: Any = _of_wrapped("param_groups")
    defaults: Any = _of_wrapped("defaults")
    wrapped: Any
    group_by_group: bool
    _wide_weights: WideWeights
    _is_loaded = False  # whether states were loaded since the last step; the model may be loaded later
    _fp32_states: Any = None  # the dict of states in which none has 16 bits any more

    @suggests_options
    def __init__(
        self,
        optimizer: Optimizer,
        *,
        max_norm: float | None = None,
        guard: bool | None = None,
        group_by_group: bool = False,
        process_group: Any = None,
    ) -> None:
        wrappable.check(optimizer)
        group_options.check_global("Masters", max_norm, guard)
        if group_by_group:
            wrappable.refuse_one_that_remembers_steps(optimizer, "group_by_group=True")
        options = dict(zip(_OPTIONS, (max_norm, guard, group_by_group), strict=True))
        peers = processes.given("Masters", process_group)
        self.__setstate__({"wrapped": optimizer, "_wide_weights": WideWeights(), "_peers": peers, **options})
        self._wide_weights.cover(self.wrapped, params_of(optimizer))
        torchao_offload.refuse(self, params_of(optimizer))
        end_earlier_releases("Masters", params_of(optimizer))

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.wrapped = state["wrapped"]  # first, because `defaults` is read from wrapped
        super().__setstate__(state)
        self._forget_steps()
        self._ledger = Ledger(follows_grads=True)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key in _KEPT}

    def __repr__(self) -> str:
        options = f"max_norm: {self.max_norm}, guard: {self._shown_guard()}"
        options += ", group_by_group: True" * self.group_by_group
        return f"{type(self).__name__} ({options}) around\n{self.wrapped!r}"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the wrapped optimizer."""
        self.wrapped.add_param_group(param_group)
        try:
            wrappable.check_group(self.param_groups[-1])
            self._wide_weights.cover(self.wrapped, self.param_groups[-1]["params"])
        except BaseException:
            self.param_groups.pop()
            raise
        end_earlier_releases("Masters", self.param_groups[-1]["params"])
        self._fp32_states = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the grads as the wrapped optimizer does. A backward that failed under release_grads is forgotten."""
        self.wrapped.zero_grad(set_to_none)
        if self._release is not None:
            self._release.begin_anew()

    @with_hooks
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Have the wrapped optimizer step, or skip the step if the guard or a scaler finds an inf or NaN.

        Args:
            closure: a function that runs forward and backward and returns the loss. ``step`` calls it once, and returns
                its result.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            params = list(dict.fromkeys(params_of(self)))  # torch lets a group hold a parameter twice
            take_step = as_written("Masters: step", self._step, _NO_GRAPH) if may_be_compiled() else self._step
            take_step(params, are_any_sharded(params))
            if self._release is not None:
                self._release.after_step(self)
        return loss

    our_step = step

    def _plans_for(self, params: list[Tensor], grads: list[Any]) -> tuple[list[WrappedPlan], list[Any]]:
        """Return the one plan, made anew for each step. It steps also without grads, as the wrapped class would."""
        self._agreement.find_parts(params, self._peers)
        return [WrappedPlan(params, self._agreement.parts, self._ledger, self._have_stepped)], grads

    def _forget_plans(self) -> None:
        """Do nothing: no plan is kept."""

    def _have_stepped(self, factor: float) -> None:
        """Have the wrapped optimizer step, with grads multiplied by the factor."""
        self._prepare(params_of(self))
        groups = self.param_groups
        for these in [[group] for group in groups] if self.group_by_group else [groups]:
            self._wide_weights.step(self.wrapped, these, factor)

    def refuse_to_step_alone(self) -> None:
        """Raise if a step changes an attribute or a group of the wrapped optimizer: it would do so once a parameter."""
        wrappable.refuse_one_that_remembers_steps(self.wrapped, "release_grads", also_in_groups=True)

    @torch.no_grad()
    def step_alone(self, group_number: int, place: int, param: Tensor) -> None:
        """Have a copy of the wrapped optimizer step this parameter: backwards of two devices run in two threads."""
        group = group_of(self, param, group_number, place)
        if group is not None and param.grad is not None:
            settled_grads([param])
            are_new = self._is_loaded or self._fp32_states is not self.state
            self._prepare(params_of(self) if are_new else [param])
            copied = wrappable.copy_with_group(self.wrapped, {**group, "params": [param]}, self.state)
            self._wide_weights.step(copied, copied.param_groups, 1.0)
            param.grad = None

    def _prepare(self, params: Sequence[Tensor]) -> None:
        """Have each 16-bit parameter with a grad own a remainder, and states in fp32: constructors may make them in 16
        bits, and so does torch where the wrapped optimizer's own load_state_dict was called."""
        states = self.state
        self._wide_weights.cover(self.wrapped, params)
        if self._is_loaded:
            self._is_loaded = False
            masters.compare_loaded("Masters", ((param, states.get(param, {})) for param in params))
        for param in params:
            state = states.get(param, {})
            masters.drop_unfit(state, param)
            if masters.needs_master(param):
                if self._fp32_states is not states:
                    state.update({key: it.float() for key, it in state.items() if _has_16_bits(key, it, param)})
                if param.grad is not None:
                    masters.give(states.setdefault(param, state), param, "split")
        self._fp32_states = states

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state dict, which its class can load, with the remainders among the states."""
        before, after = hooks_of_saving(self)
        for hook in before:
            hook(self)
        self._wide_weights.cover(self.wrapped, params_of(self))
        with self._wide_weights.shown_to(self.wrapped, params_of(self)):
            saved: dict[str, Any] = self.wrapped.state_dict()
        states = dict(saved["state"])
        for param, number in _numbered(self.param_groups, saved):
            if number in states:
                unfit = masters.unfit(param, states[number])
                states[number] = {key: it for key, it in states[number].items() if key not in unfit}
            if "remainder" in states.get(number, {}):
                states[number]["remainder"] = masters.saved_as(param, states[number]["remainder"])
        saved = saved | {"state": states}
        for hook in after:
            saved = _first(hook(self, saved), saved)
        return saved

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of Masters, or of the wrapped optimizer's class over weights of any dtype. Unlike torch,
        don't round the states to their parameter's dtype."""
        before, after = hooks_of_loading(self)
        for hook in before.values():
            state_dict = state_dict.copy()
            state_dict = _first(hook(self, state_dict), state_dict)
        checkpoint.refuse_other_dict("Masters.load_state_dict", state_dict)
        states, kept_by_param = dict(state_dict["state"]), {}
        for param, number in _numbered(self.param_groups, state_dict):
            if kept := {key: it for key, it in states.get(number, {}).items() if key in masters.KEYS.values()}:
                kept_by_param[param] = _loaded(param, number, kept)
                states[number] = {key: it for key, it in states[number].items() if key not in kept}
        self._wide_weights.cover(self.wrapped, params_of(self))
        with self._wide_weights.shown_to(self.wrapped, params_of(self)):  # torch casts states to fp32 then
            self.wrapped.load_state_dict(state_dict | {"state": states})
        for param, kept in kept_by_param.items():
            self.state.setdefault(param, {}).update(kept)
        self._fp32_states, self._is_loaded = self.state, True
        for hook in after.values():
            hook(self)


_NO_GRAPH = "must not be part of a full graph: torch.compile can't trace an optimizer of any class"
_OPTIONS = "max_norm", "guard", "group_by_group"
_KEPT = "wrapped", "grad_norm", "_skips", "_peers", "_is_loaded", "_fp32_states", "_wide_weights", *_OPTIONS


def _first(changed: Any, otherwise: Any) -> Any:
    return otherwise if changed is None else changed


def _numbered(groups: Sequence[dict[str, Any]], saved: dict[str, Any]) -> list[tuple[Tensor, Any]]:
    """Return each parameter with its number in a state dict. torch compares their lengths."""
    pairs = zip(groups, saved["param_groups"], strict=False)
    return [it for group, packed in pairs for it in zip(group["params"], packed["params"], strict=False)]


def _has_16_bits(key: str, value: Any, param: Tensor) -> bool:
    return isinstance(value, Tensor) and value.dtype == param.dtype and key not in masters.KEYS.values()


def _loaded(param: Tensor, number: Any, saved: dict[str, Tensor]) -> dict[str, Tensor]:
    for key, value in saved.items():
        if value.shape != param.shape:
            raise ValueError(
                f"Masters.load_state_dict: state[{number!r}][{key!r}] must have its parameter's shape "
                f"{tuple(param.shape)}, got {tuple(value.shape)}"
            )
    return masters.loaded("Masters", param, {key: part_for(param, value) for key, value in saved.items()})
