"""The largest batch that fits."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mpkernels._torch_private.tensors import map_leaves
from mpkernels.amp.autocasting import machines_device
from mpkernels.amp.mixed_class import Mixed
from mpkernels.amp.policy import global_policy
from mpkernels.memory import measure
from mpkernels.memory.report import memory_report
from mpkernels.optim import AdamW
from mpkernels.overflow.find_nonfinite import tensors_in

_SHARE = 0.7  # of a host's available memory


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
    if isinstance(model_or_step, nn.Module):
        measure.refuse_meta("find_max_batch_size", model_or_step)
    device = torch.device(_device_of(model_or_step) if device is None else device)
    if make_batch is None:
        make_batch = partial(_random, tuple(input_shape or ()), device, _dtype_of(model_or_step))
    if isinstance(model_or_step, nn.Module):
        restore = [model_or_step, *restore]
        if device.type == "cpu" and _least(model_or_step) > _SHARE * measure.available():
            raise _nothing_fits(device)
    try:
        with measure.restored(restore, device):
            step = _step_of(model_or_step, device) if isinstance(model_or_step, nn.Module) else model_or_step
            trial = partial(_fits, step, make_batch, device)
            largest = (
                _search_on_cpu(trial, start, max_batch) if device.type == "cpu" else _search(trial, start, max_batch)
            )
            del step, trial  # an optimizer, with its state
    finally:
        measure.clean_up()
    if largest == 0:
        raise _nothing_fits(device)
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


def _least(model: nn.Module) -> int:
    """Return the bytes that a step of the model needs for certain, before anything is tried."""
    return memory_report(model, _optimizer(model)).total


def _nothing_fits(device: torch.device) -> RuntimeError:
    return RuntimeError(f"find_max_batch_size: not even a batch of 1 fits into the memory of {device}")


def _device_of(model_or_step: Any) -> torch.device | str:
    if isinstance(model_or_step, nn.Module):
        for param in model_or_step.parameters():
            return param.device
    return machines_device()


def _dtype_of(model_or_step: Any) -> torch.dtype:
    """Return the dtype of the inputs that a model takes. One from ``to_mixed`` casts them itself."""
    if isinstance(model_or_step, nn.Module) and not isinstance(model_or_step, Mixed):
        for param in model_or_step.parameters():
            if param.is_floating_point():
                return param.dtype
    return torch.float32


def _random(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype, batch: int) -> Tensor:
    return torch.randn(batch, *shape, device=device, dtype=dtype)


def _optimizer(model: nn.Module) -> AdamW:
    return AdamW([param for param in model.parameters() if param.requires_grad])


def _step_of(model: nn.Module, device: torch.device) -> Callable[[Any], None]:
    policy = global_policy()
    optimizer = _optimizer(model)
    scaler = policy.scaler(device.type)
    model.train()

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        with policy.autocast(device.type):
            outputs = [it for it in tensors_in(_call(model, batch)) if it.requires_grad]
            if not outputs:
                raise ValueError("find_max_batch_size: model must return tensors that depend on its weights")
            loss = torch.stack([it.float().square().mean() for it in outputs]).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


def _call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def _fits(step: Callable[[Any], Any], make_batch: Callable[[int], Any], device: torch.device, batch: int) -> bool:
    try:
        step(_on(device, make_batch(batch)))
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
    except (RuntimeError, MemoryError) as error:
        if not measure.is_out_of_memory(error):
            raise
        fits = False
    else:
        fits = True
    if not fits:
        measure.clean_up()  # not before: the error holds on to the frames, and they to their tensors
    return fits


def _on(device: torch.device, batch: Any) -> Any:
    if hasattr(batch, "to"):  # a tensor, or what a tokenizer returns
        return batch.to(device)
    return map_leaves(lambda it: it.to(device) if isinstance(it, Tensor) else it, batch)


def _search(fits: Callable[[int], bool], start: int, max_batch: int) -> int:
    low, high, batch = 0, max_batch + 1, min(start, max_batch)
    while low + 1 < high:
        if fits(batch):
            low = batch
        else:
            high = batch
        batch = _next(low, high, max_batch)
    return low


def _next(low: int, high: int, max_batch: int) -> int:
    return min(2 * low, max_batch) if high > max_batch else (low + high) // 2


def _search_on_cpu(fits: Callable[[int], bool], start: int, max_batch: int) -> int:
    """Search as ``_search`` does, but count a size which may take too much as one that failed."""
    cpu = torch.device("cpu")
    measure.clean_up()
    began = before = measure.used(cpu)
    low, high, batch = 0, max_batch + 1, min(start, max_batch)
    while low < batch < high:
        measure.start_peak(cpu)
        if fits(batch):
            is_first, low, took = low == 0, batch, measure.peak(cpu) - before
            may_take = _SHARE * (measure.available() + measure.used(cpu) - began) - (before - began)
            predicted = low * may_take / max(took, 1)  # what doesn't grow with the batch makes it less than that
            batch = int(min(_next(low, high, max_batch), predicted))
            if is_first:  # what libraries load and optimizers keep is there now, and will not grow
                measure.clean_up()
                before = measure.used(cpu)
        else:
            high = batch
            batch = _next(low, high, max_batch)
    return low
