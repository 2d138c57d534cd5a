"""Grads added up over several batches before a step."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from mpkernels.amp.clipping import clip_grad_norm_
from mpkernels.amp.inf_check import given_group
from mpkernels.linear import cast_cache
from mpkernels.parameters import params_of, unwrapped


class MicroBatch:
    """One of a group of batches that make a step."""

    def __init__(
        self,
        batch: Any,
        share: float,
        is_last: bool,
        step: Callable[[], Tensor | None],
        scale: Callable[[Any], Any],
    ) -> None:
        self.batch = batch
        #: of the group: its backward steps
        self.is_last = is_last
        #: the norm of the group's unscaled grads before clipping, which the last batch's backward sets; None where
        #: nothing asked for it
        self.grad_norm: Tensor | None = None
        self._share, self._step, self._scale = share, step, scale
        self._is_done = False

    def backward(self, loss: Tensor) -> None:
        """Run the backward of the batch's mean loss, which is divided here. The group's last also clips, steps, moves
        the loss scale on and clears the grads."""
        if self._is_done:
            raise RuntimeError("accumulate: backward has been called for this batch already")
        if self._share > 0:  # else the loss may be a mean of nothing, whose gradient is NaN however small its share
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
) -> Iterator[MicroBatch]:
    """Groups of ``every`` batches, a step for each group, also for a last one with fewer.

    >>> for micro in accumulate(batches, 4, optimizer, scaler=scaler, max_norm=1.0):
    ...     with autocast():
    ...         loss = loss_of(model, micro.batch)
    ...     micro.backward(loss)

    The grads are those of one batch as large as the group. They are unscaled and clipped once, when they are complete.
    A group's batches are drawn before its first is handed out, and where a kernel of ours computes, ``LinearAct`` casts
    an fp32 weight once for all of them. To leave the loop within a group leaves its grads, and these casts as long as
    somebody holds the iterator.

    Args:
        model: if DistributedDataParallel or fully_shard (FSDP2) wraps it, grads are exchanged once for each group.
        scaler: scales the losses, steps the optimizer, and is updated.
        max_norm: for ``mpkernels.amp.clip_grad_norm_``, with the process_group of AdamW or the scaler.
            ``mpkernels.optim.AdamW(max_norm=...)`` clips by itself. ``micro.grad_norm`` of a
            group's last batch is then the norm.
        weigh: what a batch's mean loss is a mean over (examples, tokens that count), where batches differ; None counts
            all the same. Batches of weight 0 come first in their group, and leave no grad.
    """
    if every < 1:
        raise ValueError(f"accumulate: every must be above 0, got {every}")
    if max_norm is not None and not max_norm > 0:
        raise ValueError(f"accumulate: max_norm must be above 0, got {max_norm}")
    release = getattr(unwrapped(optimizer), "_release", None)
    if max_norm is not None and release is not None and release.steps_alone:
        raise ValueError("accumulate: max_norm must be given to AdamW, before release_grads: no grad is left to clip")
    scaler = torch.amp.GradScaler("cpu", enabled=False) if scaler is None else scaler
    return _micro_batches(iter(batches), every, optimizer, model, scaler, max_norm, weigh)


def _micro_batches(
    batches: Iterator[Any],
    every: int,
    optimizer: torch.optim.Optimizer,
    model: nn.Module | None,
    scaler: torch.amp.GradScaler,
    max_norm: float | None,
    weigh: Callable[[Any], float] | None,
) -> Iterator[MicroBatch]:
    def step() -> Tensor | None:
        cast_cache.clear()
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
        if not sum(weights) > 0:
            raise ValueError(f"accumulate: weigh must give a group more than 0 in all, got {weights}")
        pairs = sorted(zip(group, weights, strict=True), key=lambda pair: pair[1] > 0)  # the last one's backward counts
        with cast_cache.one_step():
            for i, (batch, weight) in enumerate(pairs):
                micro = MicroBatch(batch, weight / sum(weights), i == len(group) - 1, step, scaler.scale)
                with ExitStack() as around:
                    if not micro.is_last:
                        _keep_to_itself(around, model, optimizer)
                    yield micro
                if not micro._is_done:
                    raise RuntimeError("accumulate: the loop's body must call backward(loss) of each batch once")


def _keep_to_itself(around: ExitStack, model: Any, optimizer: Any) -> None:
    """Forward and backward: DDP makes up its mind in the forward."""
    if hasattr(model, "no_sync"):
        around.enter_context(model.no_sync())
    if hasattr(model, "set_requires_gradient_sync"):  # FSDP2's
        model.set_requires_gradient_sync(False)
        around.callback(model.set_requires_gradient_sync, True)
    release = getattr(unwrapped(optimizer), "_release", None)
    if release is not None:
        around.enter_context(release.accumulate())
