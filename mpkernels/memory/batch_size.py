"""Finds the largest batch that fits into memory."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mpkernels._shared.call_model import call, refuse_meta
from mpkernels._shared.tensors_in import tensors_in
from mpkernels._torch_private.tensors import map_leaves
from mpkernels.amp.autocasting import check_device, machines_device
from mpkernels.amp.mixed_class import Mixed
from mpkernels.amp.policy import global_policy
from mpkernels.distributed.restoring import restored
from mpkernels.memory import measure
from mpkernels.optim import AdamW
from mpkernels.optim.gradient_release import releases_of

_NOTE = "find_max_batch_size: batches are random floats; give make_batch for token numbers, start=2 for nn.BatchNorm1d"
_SHARE = 0.7  # the part of a host's available memory that a step may take


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

    Each size is tried by a real step: the size is doubled until a step runs out of memory, then bisected. Other errors
    pass through. RuntimeError if not even 1 fits, or if torch.distributed has several processes.

    On a CPU, where running out of memory would kill the process, no size after ``start`` is tried that might take more
    than 70 % of the available memory, if twice the batch needs at most twice the memory.

    Args:
        model_or_step: a model, or a training step of your own. A model is trained by ``mpkernels.optim.AdamW`` under
            the global policy, on a made-up loss; its weights, grads and buffers, and torch's random state, are restored
            afterwards. A step is a function that takes a batch and runs forward, backward and optimizer.
        input_shape: the shape of one example. Batches are then random numbers in the dtype of the first weight; for
            token ids, give ``make_batch``.
        start: the first size to try. Some layers need more than one example: nn.BatchNorm1d in training takes 2.
        device: where the inputs lie. None takes the model's device, or for a step the machine's.
        max_batch: the largest size to try.
        make_batch: a function that takes a size and returns a batch, in place of ``input_shape``; for token numbers,
            say. A tuple or list is passed to the model as arguments, a mapping as keywords.
        restore: further objects to restore afterwards: models, optimizers, anything with a ``state_dict``.
    """
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise RuntimeError(
            f"find_max_batch_size: torch.distributed must not have several processes, got {dist.get_world_size()}. "
            "Call it before init_process_group, with the model that you wrap afterwards; "
            "then take the least of all processes"
        )
    _check(model_or_step, input_shape, start, max_batch, make_batch, restore)
    if device is not None:
        check_device("find_max_batch_size", device)
    if start < 1 or max_batch < 1:
        raise ValueError(f"find_max_batch_size: start and max_batch must be above 0, got {start} and {max_batch}")
    if (input_shape is None) == (make_batch is None):
        got = "neither" if make_batch is None else "both"
        raise TypeError(f"find_max_batch_size: input_shape or make_batch must be given, got {got}")
    model = model_or_step if isinstance(model_or_step, nn.Module) else None
    params = [] if model is None else list(model.parameters())
    if model is not None:
        refuse_meta("find_max_batch_size", model)
        if not any(param.requires_grad for param in params):
            raise ValueError("find_max_batch_size: model must have a parameter to train, got one without")
        if releases_of(params):
            raise ValueError(
                "find_max_batch_size: model must keep its grads, got one after release_grads; call it before"
            )
        restore = [model, *restore]
    device = torch.device(device or (params[0].device if params else machines_device()))
    # A model from to_mixed casts its inputs itself.
    floats = [] if isinstance(model, Mixed) else [param.dtype for param in params if param.is_floating_point()]
    made: dict[str, Any] = {"dtype": floats[0] if floats else torch.float32, "device": device}
    try:
        with restored(restore, device):
            step: Any = model_or_step if model is None else _training_step(model, device)
            make = make_batch or (lambda size: torch.randn(size, *(input_shape or ()), **made))
            largest = _search(step, make, device, start, max_batch)
            del step  # frees the optimizer and its state
    except Exception as error:
        if make_batch is None and hasattr(error, "add_note"):  # since Python 3.11
            error.add_note(_NOTE)
        raise
    finally:
        measure.clean_up()
    if largest == 0:
        raise RuntimeError(f"find_max_batch_size: not even a batch of 1 fits into the memory of {device}")
    return largest


def _check(model_or_step: Any, input_shape: Any, start: Any, max_batch: Any, make_batch: Any, restore: Any) -> None:
    """Refuse arguments of other kinds before a size is tried."""
    is_list = isinstance(input_shape, Sequence) and not isinstance(input_shape, str | bytes)
    is_shape = is_list and all(hasattr(size, "__index__") and size >= 0 for size in input_shape)
    for name, is_met, wanted, got in (
        ("model_or_step", callable(model_or_step), "a module or a function", model_or_step),
        ("input_shape", input_shape is None or is_shape, "the shape of one example", input_shape),
        ("start", hasattr(start, "__index__"), "an int", start),
        ("max_batch", hasattr(max_batch, "__index__"), "an int", max_batch),
        ("make_batch", make_batch is None or callable(make_batch), "a function", make_batch),
        ("restore", isinstance(restore, Iterable), "a list of objects to restore", restore),
    ):
        if not is_met:
            raise TypeError(f"find_max_batch_size: {name} must be {wanted}, got {got!r}")


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


def _search(
    step: Callable[[Any], Any], make_batch: Callable[[int], Any], device: torch.device, start: int, max_batch: int
) -> int:
    measure.clean_up()
    measure.start_peak()
    at_start = measure.resident()
    low, high, size = 0, max_batch + 1, min(start, max_batch)
    while low < size < high:
        if _fits(step, make_batch, device, size):
            low = size
        else:
            high = size
        size = min(2 * low, max_batch) if high > max_batch else (low + high) // 2
        if device.type == "cpu" and low > 0:
            may_take = _SHARE * (measure.available() + measure.resident() - at_start)
            size = min(size, int(low * may_take / max(1, measure.peak() - at_start)))
    return low


def _fits(step: Callable[[Any], Any], make_batch: Callable[[int], Any], device: torch.device, size: int) -> bool:
    try:
        step(_on(device, make_batch(size)))
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        return True
    except (RuntimeError, MemoryError) as error:
        if not measure.is_out_of_memory(error):
            raise
    measure.clean_up()  # outside of except: there the error still keeps frames and their tensors alive
    return False


def _on(device: torch.device, batch: Any) -> Any:
    if hasattr(batch, "to"):  # a tensor, or a tokenizer's BatchEncoding
        return batch.to(device)
    return map_leaves(lambda it: it.to(device) if isinstance(it, Tensor) else it, batch)
