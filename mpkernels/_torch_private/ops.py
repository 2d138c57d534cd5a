"""Finds ops of torch's, and the kernels that the dispatcher has for our ops."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mpkernels._torch_private.finding import look_up

# Reach the dispatcher below autograd. Without the first: a list of tensors goes through Python twice. Without the
# second: autograd hears of changes from an op's own call, and not from torch.ops.
below_autograd: Any = look_up("torch._C", "_AutoDispatchBelowADInplaceOrView", None)
keys_below_autograd: Any = look_up("torch._C", "_after_ADInplaceOrView_keyset", None)
# Tells whether C++ has attached a kernel. Without it: the package assumes that none is there.
has_kernel: Callable[[str, str], bool] = look_up(
    "torch._C", "_dispatch_has_kernel_for_dispatch_key", lambda name, key: False
)


def find_kernel(op: str, key: str) -> Callable[..., Any] | None:
    """Return the kernel that C++ has attached to an op, to be called directly. Without the function: None, and if the
    kernel can't run on one of the machine's devices, the reference runs on the others, too."""
    find, keys = look_up("torch.library", "get_kernel", None), look_up("torch._C", "DispatchKeySet", None)
    own_key = look_up("torch._C", f"DispatchKey.{key}", None)
    if None in (find, keys, own_key):
        return None
    call = find(op, key).call_boxed
    return lambda *arguments: call(keys(own_key), *arguments)


def builtin_of(overload: Any) -> Callable[..., Any]:
    """Return what an op's overload calls. Without the attribute: the overload, which takes a small layer longer."""
    called: Callable[..., Any] = getattr(overload, "_op", overload)
    return called


# Multiplies many tensors in one call. Without it: one call each.
foreach_mul_: Callable[[list[Tensor], Tensor | float], object] = look_up(
    "torch", "_foreach_mul_", lambda tensors, factor: [each.mul_(factor) for each in tensors]
)

# Copies many tensors into others in one launch. Without it: one launch each.
foreach_copy_: Callable[[list[Tensor], list[Tensor]], object] = look_up(
    "torch", "_foreach_copy_", lambda to, tensors: [one.copy_(other) for one, other in zip(to, tensors, strict=True)]
)

# Adds a number to each of many tensors in one launch. Without it: one launch each.
foreach_add_: Callable[[list[Tensor], list[int]], object] = look_up(
    "torch",
    "_foreach_add_",
    lambda tensors, numbers: [it.add_(n) for it, n in zip(tensors, numbers, strict=True)],
)

# Makes a view that autograd doesn't take for a view, so that users may change the result in place. Without it: a copy.
unsafe_view: Callable[[Tensor, Sequence[int]], Tensor] = look_up(
    "torch", "ops.aten._unsafe_view", lambda tensor, shape: tensor.view(shape).clone()
)

# Computes gelu in place. Without it: torch.ops does, but the call takes longer than a small layer.
gelu_: Callable[..., Tensor] = look_up("torch", "_C._nn.gelu_", torch.ops.aten.gelu_.default)

# The op that casts. Without it: memory_report counts no casts of autocast's.
to_copy: Any = look_up("torch", "ops.aten._to_copy.default", None)
