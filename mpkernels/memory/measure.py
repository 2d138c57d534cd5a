"""Measures how much memory there is and how much is used."""

import ctypes
import gc
import os
import resource
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from mpkernels._torch_private.tensors import storage_of
from mpkernels.distributed.parts import part_of

_OUT_OF_MEMORY = "DefaultCPUAllocator:", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED"


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(it in str(error) for it in _OUT_OF_MEMORY)


def size(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the tensors' storages, for DTensors of this process's parts. A storage counts once."""
    return sum({storage_of(it): it.untyped_storage().nbytes() for it in map(part_of, tensors)}.values())


def clean_up() -> None:
    """Give unused memory back to the device and the system."""
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()
    with suppress(OSError, AttributeError):  # a libc without malloc_trim
        ctypes.CDLL(None).malloc_trim(0)


def resident() -> int:
    """Return the bytes of this process in memory."""
    return _status("VmRSS")


def start_peak() -> None:
    """Let ``peak`` start here. If the system can't forget the largest size so far, the peak is that of the process."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak() -> int:
    """Return the largest value of ``resident`` since ``start_peak``."""
    return _status("VmHWM")


def _status(field: str) -> int:
    """Return a size from the process's status. On systems that don't tell, return the largest size so far."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def available() -> int:
    """Return what the host can still give to this process and its control group without swapping."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    fields = dict(line.split(":") for line in meminfo.read_text().splitlines())
    left = int(fields["MemAvailable"].split()[0]) * 1024
    return min([left, *_left_in_control_groups(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))])


def _left_in_control_groups(root: Path, cgroup_file: Path) -> Iterator[int]:
    """Yield the free memory of each control group of this process that has a limit."""
    for line in cgroup_file.read_text().splitlines() if cgroup_file.exists() else []:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "memory" if controllers else root  # controllers are named by version 1 alone
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
        group = top / path.lstrip("/")
        for folder in (it for it in (group, *group.parents) if it.is_relative_to(top)):
            with suppress(OSError, ValueError):  # no file, or "max": no limit
                limit, usage = (int((folder / name).read_text()) for name in names)
                stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                yield limit - usage + int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
