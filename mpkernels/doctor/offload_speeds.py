"""Measures what decides which way of ``offload`` is faster here: copies to a GPU and back, and a step on the host."""

from collections.abc import Callable
from functools import partial
from time import perf_counter

import torch
from torch.nn import Parameter

from mpkernels.optim import AdamW
from mpkernels.optim.offload.copies import BUCKET, Lane, pinned

_ELEMENTS = BUCKET // 4  # whose states fill about a bucket
_MOMENTS = {"int8": torch.int8, "fp32": torch.float32}


def rows() -> dict[str, str]:
    """Return the measured speeds, and what a step of 1e9 bf16 parameters would take; {} without a GPU."""
    if not torch.cuda.is_available():
        return {}
    try:
        copies = _copies()
    except RuntimeError as error:  # without memory for them, say
        return {"not measured": str(error)}
    found = {
        name: f"{speed / 1e9:.1f} GB/s"
        for name, speed in zip(("to the GPU", "to the host", "both at once, each"), copies, strict=True)
    }
    for name, dtype in _MOMENTS.items():
        states, seconds = _step_on_host(dtype)
        times = {"'stream'": 1e9 * states / copies[2], "True": 1e9 * max(seconds, 2 / copies[2])}
        shown = ", ".join(f"offload={way} {time:.2g} s" for way, time in times.items())
        found[f"1e9 bf16 parameters, {name} moments"] = (
            f"{shown}: offload={min(times, key=times.__getitem__)} is faster"
        )
    return found


def _copies() -> tuple[float, float, float]:
    """Return the bytes a second of copies to the GPU, to the host, and each way at the same time."""
    device = torch.device("cuda", torch.cuda.current_device())
    hosts = [pinned(BUCKET) for _ in range(2)]
    on_device = [torch.empty(BUCKET, dtype=torch.uint8, device=device) for _ in range(2)]
    come, go = [(on_device[0], hosts[0])] * 4, [(hosts[1], on_device[1])] * 4
    lanes = Lane(device), Lane(device)

    def copy(*loads: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for lane, pairs in zip(lanes, loads, strict=True):
            lane.copy(pairs)
        torch.cuda.synchronize(device)

    to_gpu, to_host, both = (_seconds(partial(copy, *loads)) for loads in ((come, []), ([], go), (come, go)))
    return 4 * BUCKET / to_gpu, 4 * BUCKET / to_host, 4 * BUCKET / both


def _step_on_host(state_dtype: torch.dtype) -> tuple[float, float]:
    """Return the bytes of a parameter's states, and the seconds a parameter that a step of AdamW takes."""
    weight = Parameter(torch.ones(_ELEMENTS, dtype=torch.bfloat16))
    weight.grad = torch.ones_like(weight)
    optimizer = AdamW([weight], state_dtype=state_dtype)
    seconds = _seconds(optimizer.step)
    states = sum(it.numel() * it.itemsize for it in optimizer.state[weight].values())
    return states / _ELEMENTS, seconds / _ELEMENTS


def _seconds(run: Callable[[], object]) -> float:
    """Return the time of the best of a few runs."""
    run()
    times = []
    for _ in range(3):
        begin = perf_counter()
        run()
        times.append(perf_counter() - begin)
    return min(times)
