"""Finds the largest batch that fits into memory."""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mpkernels._shared.call_model import call
from mpkernels._torch_private.tensors import map_leaves
from mpkernels.amp.autocasting import machines_device
from mpkernels.amp.mixed_class import Mixed
from mpkernels.amp.policy import global_policy
from mpkernels.memory import measure
from mpkernels.optim import AdamW
from mpkernels.overflow.find_nonfinite import tensors_in

_SHARE = 0.7  # the part of a host's available memory that a step may take
_CPU = torch.device("cpu")


def find_max_batch_size(
    model_or_step: nn.Module | Callable[[Any], Any],
    input_shape: Sequence[int] | None = None,
    start: int = 1,
    device: str | torch.device | None = None,
    max_batch: int = 65536,
    *,
    make_batch: Callable[[int], Any] | None = None,
    restore: Iterable[Any] = (),
) -> int:
    """Return the largest batch size that a training step has memory for.

    Each size is tried by a real step: the size is doubled until a step runs out of memory, then bisected. The returned
    size has been run. Errors other than running out of memory pass through. RuntimeError if not even 1 fits.

    On a CPU, running out of memory would kill the process. So after ``start``, no size is tried that might take more
    than 70 % of the available memory, predicted from smaller sizes: the search assumes that twice the batch needs at
    most twice the memory.

    One process searches alone: where torch.distributed has several, one would run out of memory while the others wait
    for it in a collective. So RuntimeError there.

    Args:
        model_or_step: a model, or a training step of your own. A model is trained by ``mpkernels.optim.AdamW`` under
            the global policy, on a made-up loss; its weights, grads and buffers, and torch's random state, are restored
            afterwards. A step is a function that takes a batch and runs forward, backward and optimizer.
        input_shape: the shape of one example. Batches are then random numbers, in the dtype of the model's first
        weight.
        start: the first size to try. Some layers need more than one example: nn.BatchNorm1d in training takes 2.
        device: where the inputs lie. None takes the model's device, or for a step the machine's.
        max_batch: the largest size to try.
        make_batch: a function that takes a size and returns a batch, in place of ``input_shape``; for token numbers,
            say. A tuple or list is passed to the model as arguments, a mapping as keywords.
        restore: further objects to restore afterwards: models, optimizers, anything with a ``state_dict``.
    """
    _check(start, max_batch, input_shape, make_batch)
    model = model_or_step if isinstance(model_or_step, nn.Module) else None
    if model is not None:
        measure.refuse_meta("find_max_batch_size", model)
        restore = [model, *restore]
    first = None if model is None else next(model.parameters(), None)
    if device is None:
        device = machines_device() if first is None else first.device
    device = torch.device(device)
    if make_batch is None:
        make_batch = partial(_random, tuple(input_shape or ()), device, _dtype_of(model))
    try:
        with measure.restored(restore, device):
            step: Any = model_or_step if model is None else _training_step(model, device)
            trial = (_TrialOnCpu if device.type == "cpu" else _Trial)(step, make_batch, device)
            largest = _search(trial, start, max_batch)
            del step, trial  # frees the optimizer and its state
    finally:
        measure.clean_up()
    if largest == 0:
        raise RuntimeError(f"find_max_batch_size: not even a batch of 1 fits into the memory of {device}")
    return largest


def _check(start: int, max_batch: int, input_shape: Sequence[int] | None, make_batch: object) -> None:
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise RuntimeError(
            f"find_max_batch_size: torch.distributed must not have several processes, got {dist.get_world_size()}. "
            "Call it before init_process_group, with the model that you wrap afterwards; "
            "then take the least of all processes"
        )
    if start < 1 or max_batch < 1:
        raise ValueError(f"find_max_batch_size: start and max_batch must be above 0, got {start} and {max_batch}")
    if (input_shape is None) == (make_batch is None):
        got = "neither" if make_batch is None else "both"
        raise TypeError(f"find_max_batch_size: input_shape or make_batch must be given, got {got}")
    if make_batch is not None and not callable(make_batch):
        raise TypeError(f"find_max_batch_size: make_batch must be a function of a batch size, got {make_batch!r}")


def _dtype_of(model: nn.Module | None) -> torch.dtype:
    """Return the dtype of a model's inputs: fp32 for a model from ``to_mixed``, which casts inputs itself."""
    params = () if model is None or isinstance(model, Mixed) else model.parameters()
    return next((param.dtype for param in params if param.is_floating_point()), torch.float32)


def _random(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype, batch: int) -> Tensor:
    return torch.randn(batch, *shape, device=device, dtype=dtype)


def _training_step(model: nn.Module, device: torch.device) -> Callable[[Any], None]:
    policy = global_policy()
    optimizer = AdamW([param for param in model.parameters() if param.requires_grad])
    scaler = policy.scaler(device.type)
    model.train()

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        with policy.autocast(device.type):
            losses = [it.float().square().mean() for it in tensors_in(call(model, batch)) if it.requires_grad]
            if not losses:
                raise ValueError("find_max_batch_size: model must return tensors that depend on its weights")
            loss = torch.stack(losses).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


class _Trial:
    """Runs a step with batches of given sizes."""

    def __init__(self, step: Callable[[Any], Any], make_batch: Callable[[int], Any], device: torch.device) -> None:
        self._step, self._make_batch, self._device = step, make_batch, device

    def fits(self, size: int) -> bool:
        try:
            self._step(_on(self._device, self._make_batch(size)))
            if self._device.type != "cpu":
                torch.accelerator.synchronize(self._device)
            return True
        except (RuntimeError, MemoryError) as error:
            if not measure.is_out_of_memory(error):
                raise
        measure.clean_up()  # outside of except: there the error still keeps frames and their tensors alive
        return False

    def most(self) -> float:
        """Return the largest size that may be tried next."""
        return math.inf


class _TrialOnCpu(_Trial):
    """Measures how much memory a step takes, to predict which size the host has memory for."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        measure.clean_up()
        self._at_start = self._before = measure.used(_CPU)
        self._largest, self._took = 0, 1

    def fits(self, size: int) -> bool:
        measure.start_peak(_CPU)
        if not super().fits(size):
            return False
        self._took = max(measure.peak(_CPU) - self._before, 1)
        if self._largest == 0:  # the first step loads libraries and makes states, which don't grow with the batch
            measure.clean_up()
            self._before = measure.used(_CPU)
        self._largest = size
        return True

    def most(self) -> float:
        in_reach = measure.available() + measure.used(_CPU) - self._at_start
        may_take = _SHARE * in_reach - (self._before - self._at_start)
        return self._largest * may_take / self._took if self._largest else math.inf


def _on(device: torch.device, batch: Any) -> Any:
    if hasattr(batch, "to"):  # a tensor, or a tokenizer's BatchEncoding
        return batch.to(device)
    return map_leaves(lambda it: it.to(device) if isinstance(it, Tensor) else it, batch)


def _search(trial: _Trial, start: int, max_batch: int) -> int:
    low, high, size = 0, max_batch + 1, min(start, max_batch)
    while low < size < high:
        if trial.fits(size):
            low = size
        else:
            high = size
        size = min(2 * low, max_batch) if high > max_batch else (low + high) // 2
        size = int(min(size, trial.most()))
    return low
