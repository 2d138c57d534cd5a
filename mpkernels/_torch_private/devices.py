"""Tells what this machine's devices can do, and when torch begins to use CUDA."""

from collections.abc import Callable

import torch

from mpkernels._torch_private.finding import look_up


def when_cuda_begins(call: Callable[[], None]) -> None:
    """Call this as soon as torch begins to use CUDA; now if it has begun. Without the queue: call it only if torch has
    begun; otherwise a launch that a device can't run raises."""
    queue = look_up("torch.cuda", "_lazy_call", None)
    if queue is not None and torch.backends.cuda.is_built():
        queue(call)
    elif torch.cuda.is_initialized():
        call()


# Tell whether the CPU multiplies bf16. Without these: Policy.best assumes that it doesn't.
has_amx: Callable[[], bool] = look_up("torch.cpu", "_is_amx_tile_supported", lambda: False)
has_avx512_bf16: Callable[[], bool] = look_up("torch.cpu", "_is_avx512_bf16_supported", lambda: False)

# Returns the number of a device's stream. Without it: a stream object is made first, which takes longer than a cast.
current_stream: Callable[[int], int] = look_up(
    "torch._C", "_cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream
)
