"""Which calls our kernels can compute at all, and which are observed."""

import torch
from torch import Tensor
from torch.compiler import is_compiling

from mpkernels._torch_private.modes import are_transforms_active, count_dispatch_modes, count_function_modes
from mpkernels._torch_private.tensors import derives_forward
from mpkernels._torch_private.tracing import FakeTensor, is_exporting, is_jit_tracing

_SERVED = frozenset((Tensor, torch.nn.Parameter, FakeTensor))


def is_ours(x: Tensor, *parameters: Tensor | None) -> bool:
    """Return whether one of our kernels can compute this call. It needs dense, plain tensors and no forward-mode
    derivatives. Nor may torch.export or torch.jit.trace record the call, because the record must run without us."""
    return (
        type(x) in _SERVED
        and all(it is None or (type(it) in _SERVED and it.layout is torch.strided) for it in parameters)
        and x.layout is torch.strided
        and x.is_floating_point()
        and not (x.is_nested or derives_forward() or is_exporting())
        and (is_compiling() or not is_jit_tracing())
    )


def is_watched() -> bool:
    """Return whether a mode, a transform or a tracer observes the ops that torch calls."""
    return (
        derives_forward()
        or is_jit_tracing()
        or are_transforms_active()
        or count_dispatch_modes() > 0
        or count_function_modes() > 0
    )
