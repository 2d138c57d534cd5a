"""Finds the hooks that run around an optimizer's step, its loading and its saving."""

from collections.abc import Callable
from typing import Any

from mpkernels._torch_private.finding import look_up, maybe


def hooks_of_loading(optimizer: Any) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return the user's hooks that run before and after load_state_dict. Without the attributes: none."""
    before = getattr(optimizer, "_optimizer_load_state_dict_pre_hooks", {})
    return before, getattr(optimizer, "_optimizer_load_state_dict_post_hooks", {})


def hooks_of_saving(optimizer: Any) -> tuple[list[Any], list[Any]]:
    """Return the user's hooks that run before and after state_dict. Without the attributes: none, and Masters'
    state_dict doesn't call the hooks."""
    names = (f"_optimizer_state_dict_{kind}_hooks" for kind in ("pre", "post"))
    before, after = (list(getattr(optimizer, name, {}).values()) for name in names)
    return before, after


# Whether a profiler runs. Without torch's function: always, and steps take longer.
is_profiling: Callable[[], bool] = look_up("torch.autograd", "_profiler_enabled", maybe)
_NONE: dict[int, Any] = {}
_hooks_of_all_steps: tuple[Any, ...] = tuple(
    look_up("torch.optim.optimizer", f"_global_optimizer_{kind}_hooks", {}) for kind in ("pre", "post")
)


def hooks_around_step(optimizer: Any) -> tuple[list[Any], list[Any]]:
    """Return the hooks before and after an optimizer's step, both its own and those of all optimizers. Without torch's
    dicts of hooks: none, and under a scaler hooks see scaled grads."""
    before = getattr(optimizer, "_optimizer_step_pre_hooks", _NONE)
    after = getattr(optimizer, "_optimizer_step_post_hooks", _NONE)
    if not (before or after or any(_hooks_of_all_steps)):  # as nearly always, at each step
        return [], []
    before_all, after_all = _hooks_of_all_steps
    return [*before.values(), *before_all.values()], [*after.values(), *after_all.values()]


def post_hooks_of_step(optimizer: Any) -> list[Any]:
    """Return the hooks after this optimizer's step. Without the attribute: none, and Metrics miss steps that a scaler
    has skipped if there are other hooks."""
    return list(getattr(optimizer, "_optimizer_step_post_hooks", {}).values())
