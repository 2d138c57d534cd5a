"""How processes agree on a step: they clip by one norm and skip together. Where one fails, all skip."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpkernels.distributed import fsdp1, shares
from mpkernels.distributed.processes import Processes
from mpkernels.optim.masters import needs_master
from mpkernels.optim.readback import Readback
from mpkernels.optim.step_plan import Verdict


class EarlyAnswer(NamedTuple):
    """What all processes have found before a step that has hooks around it."""

    found_inf: Tensor
    own_sumsq: Tensor | None  # of this process's grads at that time
    sumsq_of_all: Tensor | None
    may_all_change: bool  # whether all have hooks or steps that may change grads: the norm is found anew

    def is_final(self) -> bool:
        return self.own_sumsq is None or not self.may_all_change or self.found_inf.item() > 0

    def contradicts(self, now: Verdict) -> bool:
        """Return whether the grads have another norm by now, and all would step."""
        before, after = self.own_sumsq, now.total_sumsq
        if before is None or after is None or self.found_inf.item() > 0:
            return False
        return before.item() != after.item()


class OtherFailedError(RuntimeError):
    """The step has failed in another process. Trying again here would leave the others waiting."""


class Agreement:
    """The processes that decide on an optimizer's steps together, and what they have answered."""

    def __init__(self, name: str) -> None:
        self._name = name  # of the optimizer's class, for errors
        self.parts: shares.Parts | None = None  # the processes that hold the other parts of DTensors
        self.has_parts = False  # whether other processes hold parts of the parameters: DTensors, or FSDP1's
        self.has_16_bit_parameters = False  # also without a grad: a process without grads decides as the others do
        self.early: EarlyAnswer | None = None  # from before hooks run until the step
        self.failures: Readback | None = None  # how many processes have failed in the last common step

    def find_parts(self, params: Sequence[Tensor], peers: Processes | None) -> None:
        """Note which processes hold parts of these DTensors, whether other processes hold parts of the parameters at
        all, and whether any has 16 bits. peers: the processes that the user has named."""
        self.parts = shares.peers_of(params, None if peers is None else peers.group)
        self.has_parts = self.parts is not None or fsdp1.has_parts(params)
        self.has_16_bit_parameters = any(map(needs_master, params))

    def holders(self, params: Sequence[Tensor], peers: Processes | None, clips: bool) -> Processes | None:
        """Return the processes that hold other parts of the parameters, or ``peers``."""
        found: Processes | None = self.parts or peers
        if found is None and self.has_parts:
            found = fsdp1.peers_of(self._name, params, clips)
        return found

    def answer(self, params: Sequence[Tensor], verdict: Verdict, processes: Processes, is_given: bool) -> Verdict:
        """Return the verdict of all processes: the early answer, if it still holds, or a new one. is_given: whether a
        scaler has given the step a found_inf, as it does after an early answer."""
        early, self.early = self.early, None
        if early is None or not is_given or not early.is_final():
            found_inf, total_sumsq, _ = self.ask(params, verdict, processes)
            return verdict._replace(found_inf=found_inf, total_sumsq=total_sumsq)
        if early.contradicts(verdict):
            raise RuntimeError(
                f"{self._name}: a hook has changed the grads in this process, after all processes had agreed on their "
                "norm; register it in all processes, or clip without max_norm"
            )
        total_sumsq = early.sumsq_of_all if verdict.has_norm else None
        return verdict._replace(found_inf=early.found_inf, total_sumsq=total_sumsq)

    def ask(
        self, params: Sequence[Tensor], verdict: Verdict, processes: Processes, may_change: bool = False
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return found_inf and the sum of squares of all processes, and in how many hooks may yet change the grads.
        Raise if another process has failed; on a GPU, where the answer is still on its way, skip the step, and let the
        next step raise. A CUDA graph skips the step at each replay, and nobody raises."""
        sumsq_of_all, found_inf, failed, changing = processes.agree(
            params, verdict.total_sumsq, verdict.found_inf, may_change=may_change
        )
        total_sumsq = sumsq_of_all if verdict.has_norm and processes.holds_parts else verdict.total_sumsq
        is_captured = failed.is_cuda and torch.cuda.is_current_stream_capturing()
        if not is_captured and not torch.compiler.is_compiling():
            self.failures = self.failures or Readback()
            self.failures.send(failed)
            self.raise_if_one_has_failed()
        return found_inf, total_sumsq, changing

    def raise_if_one_has_failed(self) -> None:
        failures: Any = self.failures
        if (
            failures is not None and (failed := failures.read()) is not None and failed.tolist() > 0
        ):  # it is on the host
            failures.forget()
            raise OtherFailedError(
                f"{self._name}: step has failed in another process, whose error says why, so that no process has "
                "stepped"
            )
