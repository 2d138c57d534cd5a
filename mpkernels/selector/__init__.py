"""Finds the fastest way to compute a case on this machine: times each way once, and remembers the choice on disk.

``linear_act``, ``gated_linear``, ``mlp`` and ``gated_mlp`` use the selector to choose between our kernels and plain
torch. The selector times nothing in these cases:

* while torch.compile traces or a CUDA graph is captured; choices that are known by then are used;
* under ``mpkernels.backend``;
* under ``torch.use_deterministic_algorithms``, because kernels differ in rounding;
* in a group of several processes, which must choose alike and may wait for each other: ``warm_up`` times there.

Where nothing was timed, plain torch computes on a GPU, and the C++ kernel on a CPU.
"""

import threading
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed, nn

from mpkernels._torch_private.modes import unseen
from mpkernels._torch_private.tracing import is_tracing
from mpkernels.distributed import processes
from mpkernels.selector import disk
from mpkernels.selector.case import Case, Choice
from mpkernels.selector.rehearsal import rehearse
from mpkernels.selector.timing import race
from mpkernels.selector.trial import Trial

__all__ = ["choices", "forget", "make_deterministic", "pin", "warm_up"]

# No call is slower than plain torch by more than 1 % or 2 us, whichever is more. A kernel of ours may take the 1 %,
# because torch's results are no better then, and it saves more for backward. In calls so brief that 2 us are more, it
# saves little, and plain torch is as good: these 2 us are left for asking who computes.
SHARE, SECONDS = 0.01, 2e-6

_known: dict[Case, Choice] = {}
by_key: dict[Hashable, str] = {}  # what was chosen for calls that ``choose`` was told of: they need not ask again
_MOST_CALLS = 4096
_pinned: str | None = None
_is_deterministic = False
_asked: dict[Case, None] | None = None  # during warm_up
_may_time_among_several = False


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
    """Return the choices of this process: a description of each case, the name of its kernel, and which kernels were
    left out, and why.

    >>> mpkernels.selector.choices()
    {'linear_act gelu, with grad 512x768x3072 bfloat16,bfloat16': 'native'}
    """
    return {str(case): str(choice) for case, choice in _known.items()}


def forget() -> None:
    """Drop all choices, also those on disk: everything is timed anew."""
    _known.clear()
    disk.clear()
    _ask_again()


def choose(case: Case, names: Sequence[str], prepare: Callable[[], Trial], key: Hashable = None) -> str:
    """Return the fastest of ``names`` for a case; if nothing may be timed, what ``unmeasured`` returns. ``prepare``
    returns the code to time. ``by_key`` remembers the choice under ``key``, so that later calls find it without
    asking."""
    kept = by_key  # as they are now: who has a say while this is timed is heard
    case = case._replace(kernels=tuple(names))
    if (name := _settled(case)) is None:
        if _asked is not None:
            _asked[case] = None
        choice = _known.get(case) or _find_out(case, prepare)
        name = unmeasured(case.device, names) if choice is None else choice.name
        if choice is None and not processes.are_several():  # where it holds until warm_up, which asks again
            return name
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
    case = case._replace(kernels=tuple(names))
    if (name := _settled(case)) is not None:
        return name
    like = [choice.name for other, choice in _known.items() if other._replace(rows=None) == case]
    return like[-1] if like else unmeasured(case.device, names)


def unmeasured(device: torch.device, names: Sequence[str]) -> str:
    """Return what computes where nothing was measured: on a GPU plain torch, which comes last, else the first."""
    return names[0] if device.type == "cpu" else names[-1]


def _settled(case: Case) -> str | None:
    """Return the choice where it needs no measurement."""
    if _pinned is not None and _pinned in case.kernels:
        return _pinned
    is_fixed = _pinned is not None or _is_deterministic or torch.are_deterministic_algorithms_enabled()
    return unmeasured(case.device, case.kernels) if is_fixed or len(case.kernels) == 1 else None


_measuring = threading.RLock()  # threads, as DataParallel's, would time each other


def _find_out(case: Case, prepare: Callable[[], Trial]) -> Choice | None:
    choice = disk.load(case.key(), case.device)
    if choice is not None and choice.name in case.kernels:
        return _known.setdefault(case, choice)
    if not _may_measure(case.device):
        return None
    with _measuring:
        return _known.get(case) or _known.setdefault(case, _measure(case, prepare))


def _may_measure(device: torch.device) -> bool:
    if is_tracing() or (processes.are_several() and not _may_time_among_several):
        return False
    if device.type != "cuda":
        return True
    with torch.cuda.device(device):
        return not torch.cuda.is_current_stream_capturing()


def _measure(case: Case, prepare: Callable[[], Trial]) -> Choice:
    devices = [case.device] if case.device.type == "cuda" else []
    try:  # a dropout that is timed takes no random number from the caller, who may want the same ones again
        with torch.random.fork_rng(devices), torch.inference_mode(False), torch.enable_grad(), unseen():
            times, left_out = race(prepare(), case.kernels, case.device)
    except torch.OutOfMemoryError:
        return Choice(unmeasured(case.device, case.kernels), {})  # the call itself may still find room
    for name, reason in left_out.items():
        text = f"mpkernels: the {name} kernel is left out of {case}: {reason}"
        warnings.warn(text, RuntimeWarning, stacklevel=2)
    choice = Choice(_best(times), left_out)
    disk.save(case.key(), case.device, choice, times)
    return choice


def _best(times: dict[str, float]) -> str:
    """Return what computes the case from now on. Without times, that is plain torch."""
    share = SHARE * times.get("torch", 0.0)
    allowance = share if share > SECONDS else 0.0
    return min(times, key=lambda name: times[name] - (0.0 if name == "torch" else allowance), default="torch")


def warm_up(model: nn.Module, *inputs: Any, process_group: Any = None, **keywords: Any) -> None:
    """Choose a kernel for every call that one training step of the model makes, by running such a step.

    In a group of several processes the selector times nothing else: rank 0 times, and all ranks get its choices, so
    that all compute the same bits. Every rank must call this function. In one process, call it before you capture a
    CUDA graph or compile the model. Call it as you will call the model: with each size of inputs, under autocast, under
    ``torch.no_grad`` for inference. The choices are kept on disk.

    Parameters, their grads, buffers and torch's random numbers are unchanged afterwards, and no hook of an optimizer or
    of DistributedDataParallel runs. Tensors that a model keeps elsewhere, in plain attributes say, may change.

    Args:
        model: the model, not yet cut into parts by FSDP or tensor parallelism. It may be in DistributedDataParallel or
            torch.compile.
        inputs: the arguments that it is called with. Its outputs may be nested in tuples, lists and dicts.
        keywords: the keyword arguments that it is called with.
        process_group: the ranks that call this function; None is all. The group's rank 0 times.
    """
    processes.given("selector.warm_up", process_group)
    is_first = not processes.are_several() or distributed.get_rank(process_group) == 0
    error: Exception | None = None
    with _asking(may_time=is_first) as asked:
        try:
            rehearse(model, inputs, keywords)
        except Exception as raised:  # the others must hear of it
            error = raised
        chosen = {case.anywhere(): _known[case] for case in asked if case in _known}
        chosen = processes.of_first_rank("selector.warm_up", chosen, error, process_group)
        for case in asked:
            if (choice := chosen.get(case.anywhere())) is not None:
                _known.pop(case, None)  # the newest comes last
                _known[case] = choice


@contextmanager
def _asking(may_time: bool) -> Iterator[dict[Case, None]]:
    """Yield the cases that are asked for within, of which none counts as known by its key."""
    global _asked, _may_time_among_several
    _asked, _may_time_among_several = {}, may_time
    _ask_again()
    try:
        yield _asked
    finally:
        _asked, _may_time_among_several = None, False
        _ask_again()
