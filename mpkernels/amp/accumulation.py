"""Grads added up over several batches before a step."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from mpkernels._shared.call_model import refuse_no_model, refuse_no_optimizer
from mpkernels._shared.dtypes import dtype_of
from mpkernels._shared.parameters import params_of, unwrapped
from mpkernels.amp.clipping import clip_grad_norm_
from mpkernels.amp.inf_check import given_group
from mpkernels.amp.wide_grads import WideGrads
from mpkernels.linear import cast_cache
from mpkernels.optim.group_options import check_max_norm


@dataclass(eq=False)
class MicroBatch:
    """One batch of a group, as ``accumulate`` yields it. The group's batches make one step together."""

    batch: Any
    #: whether this is the group's last batch, whose backward takes the step
    is_last: bool
    _share: float
    _step: Callable[[], Tensor | None]
    _scale: Callable[[Any], Any]
    #: the norm of the group's unscaled grads before clipping. The last batch's backward sets it; None if nothing
    #: computes the norm
    grad_norm: Tensor | None = None
    _is_done: bool = False

    def backward(self, loss: Tensor) -> None:
        """Run the backward of the batch's mean loss, weighted by the batch's share of the group. The last batch's
        backward also clips, takes the step, updates the loss scale and clears the grads."""
        if self._is_done:
            raise RuntimeError("accumulate: backward has been called for this batch already")
        if self._share > 0:  # a share of 0 may be a mean of nothing, whose gradient is NaN even times 0
            self._scale(loss * self._share).backward()
        self._is_done = True
        if self.is_last:
            self.grad_norm = self._step()


def accumulate(
    batches: Iterable[Any],
    every: int,
    optimizer: torch.optim.Optimizer,
    *,
    model: nn.Module | None = None,
    scaler: torch.amp.GradScaler | None = None,
    max_norm: float | None = None,
    weigh: Callable[[Any], float] | None = None,
    grad_dtype: torch.dtype | str | None = None,
) -> Iterator[MicroBatch]:
    """Yield the batches, and take one step for each group of ``every`` batches. The last group may have fewer.

    >>> for micro in accumulate(batches, 4, optimizer, scaler=scaler, max_norm=1.0):
    ...     with autocast():
    ...         loss = loss_of(model, micro.batch)
    ...     micro.backward(loss)

    The body calls neither ``zero_grad`` nor ``step``, nor any method of the scaler: the last batch's ``backward`` does.
    A step uses the same grads as one batch as large as the group. They are unscaled and clipped once, when they are
    complete. All batches of a group are drawn before the first one is yielded. ``LinearAct`` casts an fp32 weight once
    per group if one of our kernels computes it. If you leave the loop within a group, its grads stay, and these casts
    stay until the iterator is freed.

    Args:
        batches: any iterable.
        every: how many batches make a group.
        optimizer: is stepped, and its grads are cleared, once per group.
        model: the model, if DistributedDataParallel or fully_shard (FSDP2) wraps it: its grads are then exchanged once
            per group.
        scaler: scales the losses, steps the optimizer, and is updated once per group.
        max_norm: clips the grads by ``mpkernels.amp.clip_grad_norm_``, with the process_group of AdamW or the scaler.
            Leave it out if you use ``mpkernels.optim.AdamW(max_norm=...)``, which clips by itself. Either way,
            ``grad_norm`` of a group's last batch holds the norm.
        weigh: returns the weight of a batch: the number of examples or tokens that its mean loss is a mean over. None
            weighs all batches equally. Batches of weight 0 come first in their group, and add nothing to the grads.
        grad_dtype: ``torch.float32`` adds the grads of 16-bit parameters up in fp32, in 4 bytes a parameter. None adds
            them up in their parameters' dtype. The optimizer must take such grads, as ours do.
    """
    if not isinstance(every, int) or every < 1:
        raise ValueError(f"accumulate: every, the number of batches in a group, must be an int above 0, got {every!r}")
    refuse_no_optimizer("accumulate", optimizer)
    if model is not None:
        refuse_no_model("accumulate", model)
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise TypeError(f"accumulate: scaler must be a torch.amp.GradScaler or None, got {type(scaler).__name__}")
    check_max_norm("accumulate", max_norm)
    if weigh is not None and not callable(weigh):
        raise TypeError(f"accumulate: weigh must be a function of a batch, got {weigh!r}")
    release = getattr(unwrapped(optimizer), "_release", None)
    adds_up = release is not None and release.adds_up
    if max_norm is not None and release is not None and (release.steps_alone or adds_up):
        raise ValueError("accumulate: max_norm must be given to AdamW, before release_grads: no grad is left to clip")
    if dtype_of(grad_dtype) not in (None, torch.float32):
        raise ValueError(f"accumulate: grad_dtype must be torch.float32 or None, got {grad_dtype!r}")
    wide = None if grad_dtype is None or adds_up else WideGrads("accumulate", optimizer, model)
    scaler = torch.amp.GradScaler("cpu", enabled=False) if scaler is None else scaler
    return _micro_batches(iter(batches), every, optimizer, model, scaler, max_norm, weigh, wide)


def _micro_batches(
    batches: Iterator[Any],
    every: int,
    optimizer: torch.optim.Optimizer,
    model: nn.Module | None,
    scaler: torch.amp.GradScaler,
    max_norm: float | None,
    weigh: Callable[[Any], float] | None,
    wide: WideGrads | None,
) -> Iterator[MicroBatch]:
    def step() -> Tensor | None:
        cast_cache.clear()
        if wide is not None:
            wide.exchange()
        norm: Tensor | None = None
        if max_norm is not None:
            scaler.unscale_(optimizer)
            norm = clip_grad_norm_(params_of(optimizer), max_norm, process_group=given_group(scaler, optimizer))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return getattr(unwrapped(optimizer), "grad_norm", None) if norm is None else norm

    while group := list(islice(batches, every)):
        weights = [1.0 if weigh is None else float(weigh(batch)) for batch in group]
        if not all(0 <= weight < math.inf for weight in weights):
            raise ValueError(f"accumulate: weigh must give each batch a finite weight of 0 or more, got {weights}")
        if not sum(weights) > 0:
            raise ValueError(f"accumulate: weigh must give a group more than 0 in all, got {weights}")
        pairs = sorted(zip(group, weights, strict=True), key=lambda pair: pair[1] > 0)  # the last backward steps
        with cast_cache.one_step(), nullcontext() if wide is None else wide.allowed():
            for i, (batch, weight) in enumerate(pairs):
                micro = MicroBatch(batch, i == len(group) - 1, weight / sum(weights), step, scaler.scale)
                with ExitStack() as around:
                    if wide is not None:
                        wide.keep_from_exchange(around)
                    if not micro.is_last:
                        _keep_to_itself(around, model, optimizer, wide is not None)
                    yield micro
                if not micro._is_done:
                    raise RuntimeError("accumulate: the loop's body must call backward(loss) of each batch once")


def _keep_to_itself(around: ExitStack, model: Any, optimizer: Any, are_wide: bool) -> None:
    """Keep a batch's grads in this process's memory, without an exchange. The context must contain the forward, too,
    because DDP decides there whether to exchange. Wide grads are exchanged by FSDP2 at each batch, because it would add
    up the kept ones in its own dtype."""
    if hasattr(model, "no_sync"):
        around.enter_context(model.no_sync())
    if hasattr(model, "set_requires_gradient_sync") and not are_wide:  # FSDP2's
        model.set_requires_gradient_sync(False)
        around.callback(model.set_requires_gradient_sync, True)
    release = getattr(unwrapped(optimizer), "_release", None)
    if release is not None:
        around.enter_context(release.accumulate())
