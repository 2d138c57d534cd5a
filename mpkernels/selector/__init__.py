"""Chooses what computes a linear layer or block: a kernel of ours or plain torch.

The choice follows ``table`` by what a call shows: the device, the dtype, the CPU's instructions, the sizes. So the
choice is the same in every run and process. ``mpkernels.tune`` times the ways for a model instead, and ``pin`` forces
one. Nothing else times anything.
"""

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from mpkernels.selector import table
from mpkernels.selector.case import Case

__all__ = ["choices", "forget", "pin"]

Computes = Callable[..., Tensor | None]
by_key: dict[Hashable, Computes] = {}  # what computes each call by its key, so that later calls needn't ask
left_to_torch: set[Hashable] = set()  # keys of the calls that torch computes with any number of rows
_MOST_CALLS = 4096
_chosen: dict[Case, str] = {}  # in this process
tuned: dict[Case, str] = {}  # by ``mpkernels.tune``
_pinned: str | None = None
_asked: dict[Case, Callable[[], Any]] | None = None  # while ``tune`` runs a model: each case, and what times it


def pin(name: str | None) -> None:
    """From now on, use the named kernel wherever it is available: ``"native"``, ``"triton"`` or ``"torch"``. None
    returns to what was tuned, and to the table."""
    global _pinned
    if name not in ("native", "triton", "torch", None):
        raise ValueError(f"pin: name must be 'native', 'triton', 'torch' or None, got {name!r}")
    _pinned = name
    ask_again()


def choices() -> dict[str, str]:
    """Return the choices of this process since the last ``tune``, ``pin`` or ``forget``: a description of each case,
    and the name of what computes it.

    >>> mpkernels.selector.choices()
    {'mlp gelu, bias, out_bias, with grad 512x768x3072x768 float32': 'native'}
    """
    return {str(case): name for case, name in list(_chosen.items())}  # a copy: other threads may choose meanwhile


def forget() -> None:
    """Drop what ``mpkernels.tune`` has found: the table decides again."""
    tuned.clear()
    ask_again()


def choose(case: Case, trial: Callable[[], Any] | None = None) -> str:
    """Return what computes a case: what is pinned, else what was tuned, else what the table says. ``trial`` returns
    code to time the case with."""
    # Looked up first, because pin and tune replace these dicts: a choice made before that is dropped with the old ones.
    chosen, asked = _chosen, _asked
    if asked is not None and trial is not None and len(case.kernels) > 1:
        asked[case] = trial
    name = tuned.get(case) or _tuned_for_any_rows(case) or table.kernel(case)
    if _pinned is not None and _pinned in case.kernels:
        name = _pinned
    chosen[case] = name
    return name


def kept_calls() -> dict[Hashable, Computes]:
    """Return ``by_key``, for a call that will be chosen for. Look it up before the choice, as ``choose`` does."""
    if max(len(by_key), len(_chosen)) >= _MOST_CALLS:
        ask_again()
    return by_key


def _tuned_for_any_rows(case: Case) -> str | None:
    """Return what was last tuned for such a case, in a graph that serves any number of rows."""
    if case.rows is not None or not tuned:
        return None
    return next((name for other, name in reversed(list(tuned.items())) if other._replace(rows=None) == case), None)


def leave_to_torch(case: Case, key: Hashable) -> None:
    """Remember that torch computes such calls with any number of rows, if no line, tuning or pin says otherwise."""
    kept = left_to_torch  # looked up first, as in ``choose``
    if not _is_open() and (_pinned or table.leaves_to_torch(case)):
        kept.add(key)


def is_never_ours(op: str, device: torch.device, activation: str, hidden: int) -> bool:
    """Return whether torch computes such calls of so many hidden features in any number of rows and any dtype."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    cases = [Case(op, device, (hidden,) * 3, (dtype,), activation, True, "", None) for dtype in dtypes]
    return not _is_open() and (_pinned is not None or all(map(table.leaves_to_torch, cases)))


def _is_open() -> bool:
    """Return whether something else than the table and a pin to torch chooses kernels."""
    return bool(tuned) or _asked is not None or _pinned not in ("torch", None)


def ask_again() -> None:
    global by_key, left_to_torch, _chosen
    by_key, left_to_torch, _chosen = {}, set(), {}  # not cleared: other threads may be reading them
