"""Ops of torch's, and the kernels that the dispatcher has for ours."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mpkernels._torch_private.finding import look_up

# The dispatcher below autograd. Without the first: a list of tensors goes through Python twice. Without the second: an
# op's own call tells autograd what has changed, and torch.ops doesn't.
below_autograd: Any = look_up("torch._C", "_AutoDispatchBelowADInplaceOrView", None)
keys_below_autograd: Any = look_up("torch._C", "_after_ADInplaceOrView_keyset", None)
# Whether C++ has attached a kernel. Without it: the package takes none of them for there.
has_kernel: Callable[[str, str], bool] = look_up(
    "torch._C", "_dispatch_has_kernel_for_dispatch_key", lambda name, key: False
)


def find_kernel(op: str, key: str) -> Callable[..., Any] | None:
    """Return the kernel that C++ has attached to an op, to be called directly. Without the function: nothing, and where
    it can't run on one of the machine's devices, the reference runs on the others, too."""
    find, keys = look_up("torch.library", "get_kernel", None), look_up("torch._C", "DispatchKeySet", None)
    own_key = look_up("torch._C", f"DispatchKey.{key}", None)
    if None in (find, keys, own_key):
        return None
    call = find(op, key).call_boxed
    return lambda *arguments: call(keys(own_key), *arguments)


# Grads of many parameters in one call. Without it: in as many.
foreach_mul_: Callable[[list[Tensor], Tensor], object] = look_up(
    "torch", "_foreach_mul_", lambda tensors, factor: [each.mul_(factor) for each in tensors]
)

# A number for each of many tensors in one launch. Without it: in as many.
foreach_add_: Callable[[list[Tensor], list[int]], object] = look_up(
    "torch",
    "_foreach_add_",
    lambda tensors, numbers: [it.add_(n) for it, n in zip(tensors, numbers, strict=True)],
)

# A view that autograd takes for none, so that users may change the result in place. Without it: a copy.
unsafe_view: Callable[[Tensor, Sequence[int]], Tensor] = look_up(
    "torch", "ops.aten._unsafe_view", lambda tensor, shape: tensor.view(shape).clone()
)

# gelu in place, by C++ as torch's other functions. Without it: by torch.ops, which in a small layer takes longer than
# the layer.
gelu_: Callable[..., Tensor] = look_up("torch", "_C._nn.gelu_", torch.ops.aten.gelu_.default)

# The op that casts. Without it: memory_report counts no casts of autocast's.
to_copy: Any = look_up("torch", "ops.aten._to_copy.default", None)
