"""Finds the fastest way to compute a case on this machine: times each way once, and remembers the choice on disk.

``linear_act`` uses the selector to choose between our kernels and plain torch. The selector times nothing in these
cases:

* while torch.compile traces or a CUDA graph is captured; choices that are known by then are used;
* under ``mpkernels.backend``;
* under ``torch.use_deterministic_algorithms``, because kernels differ in rounding.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch

from mpkernels._torch_private import is_tracing, unseen
from mpkernels.selector import disk
from mpkernels.selector.timing import Run, race

__all__ = ["choices", "forget", "make_deterministic", "pin"]

OURS_ANYWAY = 1.01  # times torch's time: its results are no better then, and it saves more for backward


class Case(NamedTuple):
    """What the time of a call depends on. ``rows`` is rounded up to a power of two."""

    op: str
    device: torch.device
    sizes: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    variant: str
    rows: int | None

    def __str__(self) -> str:
        dtypes = ",".join(str(dtype).removeprefix("torch.") for dtype in self.dtypes)
        return f"{self.op} {self.variant} {self.rows}x{'x'.join(map(str, self.sizes))} {dtypes}"


_known: dict[Case, str] = {}
by_key: dict[Hashable, str] = {}  # what was chosen for calls that ``choose`` was told of: they need not ask again
_MOST_CALLS = 4096
_pinned: str | None = None
_is_deterministic = False


def pin(name: str | None) -> None:
    """From now on, use the named kernel wherever it is available: ``"native"``, ``"triton"`` or ``"torch"``. None
    returns to the fastest one."""
    global _pinned
    if name not in ("native", "triton", "torch", None):
        raise ValueError(f"pin: name must be 'native', 'triton', 'torch' or None, got {name!r}")
    _pinned = name
    _ask_again()


def make_deterministic() -> None:
    """From now on, time nothing and use no timed choice, so that equal calls give equal bits."""
    global _is_deterministic
    _is_deterministic = True
    _ask_again()


def choices() -> dict[str, str]:
    """Return the choices of this process: a description of each case, and the name of its kernel.

    >>> mpkernels.selector.choices()
    {'linear_act gelu, with grad 512x768x3072 bfloat16,bfloat16': 'native'}
    """
    return {str(case): name for case, name in _known.items()}


def forget() -> None:
    """Drop all choices, also those on disk: everything is timed anew."""
    _known.clear()
    disk.clear()
    _ask_again()


def choose(case: Case, names: Sequence[str], prepare: Callable[[str], Run], key: Hashable = None) -> str:
    """Return the fastest of ``names`` for a case, or the first one if nothing may be timed. ``prepare`` returns the
    code to time for a name. ``by_key`` remembers the choice under ``key``, so that later calls find it without
    asking."""
    kept = by_key  # as they are now: who has a say while this is timed is heard
    name = _settled(names) or _known.get(case)
    if name is None:
        if (name := _find_out(case, names, prepare)) is None:
            return names[0]
        name = _known.setdefault(case, name)
    if key is not None:
        kept[key] = name
        if len(kept) > _MOST_CALLS:
            _ask_again()
    return name


def _ask_again() -> None:
    global by_key
    by_key = {}  # not cleared: other threads may be reading it


def known(case: Case, names: Sequence[str]) -> str:
    """Return what was last chosen for such a case with any number of rows."""
    if (name := _settled(names)) is not None:
        return name
    like = [name for other, name in _known.items() if other._replace(rows=None) == case]
    return like[-1] if like else names[0]


def _settled(names: Sequence[str]) -> str | None:
    """Return the choice where it needs no look at the case."""
    if _pinned is not None:
        return _pinned if _pinned in names else names[0]
    if len(names) == 1 or _is_deterministic or torch.are_deterministic_algorithms_enabled():
        return names[0]
    return None


def _find_out(case: Case, names: Sequence[str], prepare: Callable[[str], Run]) -> str | None:
    name = disk.load(str(case), case.device)
    if name in names:
        return name
    return _measure(case, names, prepare) if _may_measure(case.device) else None


def _may_measure(device: torch.device) -> bool:
    if is_tracing():
        return False
    if device.type != "cuda":
        return True
    with torch.cuda.device(device):
        return not torch.cuda.is_current_stream_capturing()


def _measure(case: Case, names: Sequence[str], prepare: Callable[[str], Run]) -> str:
    try:
        with torch.inference_mode(False), torch.enable_grad(), unseen():
            times = race({name: prepare(name) for name in names}, case.device)
    except torch.OutOfMemoryError:
        return names[0]  # the call itself may still find room
    fastest = min(times, key=lambda name: times[name] * (1 if name == "torch" else 1 / OURS_ANYWAY))
    disk.save(str(case), case.device, fastest, times)
    return fastest
