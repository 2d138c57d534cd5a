"""What memory there is, how much of it is used, and what can be put back as it was."""

import ctypes
import gc
import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mpkernels._torch_private.tensors import storage_of
from mpkernels.distributed.parts import part_of, reshard

_OUT_OF_MEMORY = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "MPS backend out of memory",
)
_OF_PROCESS = Path("/proc/self/cgroup")
_FILES_V1, _FILES_V2 = ("memory.limit_in_bytes", "memory.usage_in_bytes"), ("memory.max", "memory.current")


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)


def size(tensors: Iterable[Tensor]) -> int:
    """Bytes of the memory that they, or this process's parts of them, lie in, each byte once."""
    storages = {storage_of(it): it.untyped_storage().nbytes() for it in map(part_of, tensors)}
    return sum(storages.values())


def refuse_meta(op: str, model: nn.Module) -> None:
    """Raise if a model can't run for want of memory of its own."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise ValueError(
                f"{op}: model must have memory, got {name} on the meta device; to_empty(device=...) gives it some"
            )


def clean_up() -> None:
    """Gives back what nobody holds any more."""
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # a libc without it
            ctypes.CDLL(None).malloc_trim(0)


def used(device: torch.device) -> int:
    """CUDA: allocated by torch. CPU: what of this process is resident."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return _status("VmRSS") or _largest_resident()


def start_peak(device: torch.device) -> None:
    """Let ``peak`` count from here on; from the beginning, where the system can't forget the largest so far."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak(device: torch.device) -> int:
    """Return the most that ``used`` has been."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device)
    return _status("VmHWM") or _largest_resident()


def available() -> int:
    """Return what the host can still hand out without swapping, to this process and its control group."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return _physical() // 2
    fields = dict(line.split(":") for line in meminfo.read_text().splitlines())
    left = int(fields["MemAvailable"].split()[0]) * 1024
    return min([left, *_left_in_control_groups()])


def _left_in_control_groups(root: Path = Path("/sys/fs/cgroup"), of_process: Path = _OF_PROCESS) -> Iterator[int]:
    """Return the room in each group of this process that has a limit."""
    for line in of_process.read_text().splitlines() if of_process.exists() else []:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "memory" if controllers else root
        limit, usage = _FILES_V1 if controllers else _FILES_V2
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(top):
                break
            with suppress(OSError, ValueError):  # not there, or "max": no limit
                stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                reclaimable = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
                yield int((folder / limit).read_text()) - int((folder / usage).read_text()) + reclaimable


def _status(field: str) -> int | None:
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    return None


def _largest_resident() -> int:
    import resource  # which Windows lacks

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _physical() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def restored(objects: Iterable[Any], device: torch.device) -> Iterator[None]:
    """Afterwards modules (with grads), optimizers, whatever else has a ``state_dict``, and torch's random numbers are
    what they were."""
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        for each in objects:
            if isinstance(each, nn.Module):
                stack.enter_context(_restored_module(each))
            elif isinstance(each, torch.optim.Optimizer):
                stack.enter_context(_restored_optimizer(each))
            else:
                stack.callback(each.load_state_dict, deepcopy(each.state_dict()))
        yield


@contextmanager
def _restored_module(module: nn.Module) -> Iterator[None]:
    """Keep what is lent on the host meanwhile: it is the device's memory that matters."""
    params = [(param, param.detach().to("cpu", copy=True), param.grad) for param in module.parameters()]
    buffers = [
        (owner, name, buffer, buffer.detach().to("cpu", copy=True))
        for owner in module.modules()
        for name, buffer in owner.named_buffers(recurse=False, remove_duplicate=False)
    ]
    modes = [(each, each.training) for each in module.modules()]
    for param, *_ in params:
        param.grad = None
    try:
        yield
    finally:
        reshard(module)
        with torch.no_grad():
            for param, value, grad in params:
                param.copy_(value)
                param.grad = grad
            for owner, name, buffer, value in buffers:
                if not torch.equal(buffer.cpu(), value):  # an expanded one, which nobody can write to, stays as it is
                    buffer.copy_(value)
                setattr(owner, name, buffer)
        for each, training in modes:
            each.training = training


@contextmanager
def _restored_optimizer(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """It works on copies meanwhile."""
    attributes, state = dict(vars(optimizer)), optimizer.state
    groups = [{key: it for key, it in group.items() if key != "params"} for group in optimizer.param_groups]
    copied = {param: deepcopy(dict(of_param)) for param, of_param in state.items()}
    optimizer.state = defaultdict(dict, copied)
    for name, value in attributes.items():
        if isinstance(value, Tensor):
            setattr(optimizer, name, value.clone())
    try:
        yield
    finally:
        vars(optimizer).clear()
        vars(optimizer).update(attributes)
        for group, saved in zip(optimizer.param_groups, groups, strict=True):
            group.update(saved)
