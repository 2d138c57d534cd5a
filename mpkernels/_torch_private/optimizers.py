"""Which hooks run around an optimizer's step and its loading."""

from typing import Any

from mpkernels._torch_private.finding import look_up


def hooks_of_loading(optimizer: Any) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return the user's hooks that run before and after load_state_dict. Without the attributes: none, and torch calls
    the hooks with the stand-in that it loads."""
    before = getattr(optimizer, "_optimizer_load_state_dict_pre_hooks", {})
    return before, getattr(optimizer, "_optimizer_load_state_dict_post_hooks", {})


def hooks_of_saving(optimizer: Any) -> tuple[list[Any], list[Any]]:
    """Return the user's hooks that run before and after state_dict. Without the attributes: none, and they are not
    called around that of Masters."""
    names = (f"_optimizer_state_dict_{kind}_hooks" for kind in ("pre", "post"))
    before, after = (list(getattr(optimizer, name, {}).values()) for name in names)
    return before, after


_NONE: dict[int, Any] = {}
_hooks_of_all_steps: tuple[Any, ...] = tuple(
    look_up("torch.optim.optimizer", f"_global_optimizer_{kind}_hooks", {}) for kind in ("pre", "post")
)


def hooks_around_step(optimizer: Any) -> tuple[list[Any], list[Any]]:
    """Return the hooks before and after an optimizer's step, its own and those of all. Without torch's books of them:
    none, and under a scaler they see scaled grads."""
    before = getattr(optimizer, "_optimizer_step_pre_hooks", _NONE)
    after = getattr(optimizer, "_optimizer_step_post_hooks", _NONE)
    if not (before or after or any(_hooks_of_all_steps)):  # as nearly always, at each step
        return [], []
    before_all, after_all = _hooks_of_all_steps
    return [*before.values(), *before_all.values()], [*after.values(), *after_all.values()]


def post_hooks_of_step(optimizer: Any) -> list[Any]:
    """Return what is called after an optimizer's own step. Without the book: nothing, and Metrics miss a step that a
    scaler has skipped, where there are hooks of others."""
    return list(getattr(optimizer, "_optimizer_step_post_hooks", {}).values())
