"""The verdict of several processes on a step: they clip by one norm and skip together. Where one fails, all skip."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mpkernels.distributed.processes import Processes, hand_back
from mpkernels.optim.plan import Verdict
from mpkernels.optim.readback import Readback
from mpkernels.optim.step_outcome import StepOutcome, find_deciders


def agree(optimizer: Any, params: Sequence[Tensor], verdict: Verdict, processes: Processes) -> Verdict:
    """Return the verdict of all processes."""
    outcome: StepOutcome = optimizer._step_outcome
    agreed, outcome.agreed = outcome.agreed, None
    if agreed is None or not hasattr(optimizer, "found_inf") or not agreed.is_final():
        found_inf, total_sumsq, _ = ask_all(optimizer, params, verdict, processes)
        return verdict._replace(found_inf=found_inf, total_sumsq=total_sumsq)
    hand_back(optimizer, agreed.found_inf)
    if agreed.contradicts(verdict):
        raise RuntimeError(
            f"{type(optimizer).__name__}: a hook has changed the grads in this process, after all processes had agreed "
            "on their norm; register it in all processes, or clip without max_norm"
        )
    total_sumsq = agreed.sumsq_of_all if verdict.has_norm else None
    return verdict._replace(found_inf=agreed.found_inf, total_sumsq=total_sumsq)


def ask_all(
    optimizer: Any, params: Sequence[Tensor], verdict: Verdict, processes: Processes, may_change: bool = False
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return found_inf and the sum of squares of all processes, and in how many hooks may yet change the grads. Raise
    if another process has failed; on a GPU, where the answer is still on its way, skip the step, and let the next step
    raise. A CUDA graph skips the step at each replay, and nobody raises."""
    sumsq_of_all, found_inf, failed, changing = processes.agree(
        params, verdict.total_sumsq, verdict.found_inf, may_change=may_change
    )
    total_sumsq = sumsq_of_all if verdict.has_norm and processes.holds_parts else verdict.total_sumsq
    is_captured = failed.is_cuda and torch.cuda.is_current_stream_capturing()
    if not is_captured and not torch.compiler.is_compiling():
        outcome: StepOutcome = optimizer._step_outcome
        outcome.failures = outcome.failures or Readback()
        outcome.failures.send(failed)
        raise_if_one_has_failed(optimizer, outcome.failures)
    hand_back(optimizer, found_inf)
    return found_inf, total_sumsq, changing


def raise_if_one_has_failed(optimizer: Any, failures: Readback) -> None:
    failed: Any = failures.read()
    if failed is not None and failed.tolist() > 0:  # no wait: failed lies on the host
        failures.forget()
        optimizer._forget_plans()
        raise RuntimeError(
            f"{type(optimizer).__name__}: step has failed in another process, whose error says why, so that no process "
            "has stepped"
        )


def tell_failure(optimizer: Any, params: Sequence[Tensor]) -> None:
    """Tell the processes that wait for this one's verdict that it has none, so that they don't step either."""
    optimizer._step_outcome.find_parts(params, optimizer._peers)  # if the step has not come so far
    _, processes = find_deciders(optimizer, (), params, getattr(optimizer, "found_inf", None))
    if processes is not None:
        optimizer._forget_plans()
        processes.agree(params, None, None, has_failed=True)
