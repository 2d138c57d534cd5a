"""fp32 grads of 16-bit parameters, for accumulate: each batch's grads are added up without being rounded again."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mpkernels._shared.parameters import is_sharded, params_of, set_grad_dtype, unwrapped
from mpkernels._torch_private.sharded import is_fsdp1s, replaces_exchange
from mpkernels.distributed import ddp
from mpkernels.distributed.parts import await_grad
from mpkernels.optim.masters import needs_master

_NEEDS_MODEL = "which exchanges grads in their parameters' dtype; pass the wrapper as model, or leave grad_dtype out"


class WideGrads:
    """Lets a group of batches have fp32 grads, as ``grad_dtype=torch.float32`` asks, and exchanges them."""

    def __init__(self, op: str, optimizer: Any, model: nn.Module | None) -> None:
        self._op, self._optimizer = op, optimizer
        release = getattr(unwrapped(optimizer), "_release", None)
        if release is not None and release.is_on:
            raise ValueError(f"{op}: grad_dtype must be left out with release_grads, which narrows grads or frees them")
        if any(map(is_fsdp1s, params_of(optimizer))):
            raise ValueError(
                f"{op}: grad_dtype must be left out under FullyShardedDataParallel, which adds grads up itself; use "
                "fully_shard (FSDP2)"
            )
        self._wrappers = [it for it in ddp.wrappers_in(model) if any(map(needs_master, ddp.exchanged_by(it)))]
        if any(it.static_graph or replaces_exchange(it) for it in self._wrappers):
            raise ValueError(
                f"{op}: grad_dtype must be left out where DistributedDataParallel has static_graph=True, whose first "
                "backward exchanges grads even under no_sync, or a communication hook, which would not be called"
            )
        if not self._wrappers:
            ddp.watch()
            ddp.refuse(op, self._params(), _NEEDS_MODEL)

    def _params(self) -> list[Tensor]:
        return [
            param
            for param in params_of(self._optimizer)
            if needs_master(param) and param.requires_grad and param.is_leaf
        ]

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Let grads be fp32 in this context. Grads that are left at its end are rounded to their earlier dtype."""
        before = [(param, param.grad_dtype) for param in self._params()]
        hooks = []
        try:
            for param, _ in before:
                if is_sharded(param):  # FSDP2 assigns the first grad in its parameter's dtype, and adds others
                    set_grad_dtype(param, None)
                    hooks.append(param.register_post_accumulate_grad_hook(_widen))
                    _widen(param)
                else:
                    set_grad_dtype(param, torch.float32)
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for param, dtype in before:
                set_grad_dtype(param, dtype)

    def keep_from_exchange(self, around: ExitStack) -> None:
        """Within ``around``, keep DistributedDataParallel from exchanging grads, also those of a group's last batch."""
        for wrapper in self._wrappers:
            around.enter_context(wrapper.no_sync())

    def exchange(self) -> None:
        """Exchange the grads at a group's end, because DistributedDataParallel was kept from it."""
        for wrapper in self._wrappers:
            ddp.exchange(self._op, wrapper)


def _widen(param: Tensor) -> None:
    await_grad(param)
    if param.grad is not None and needs_master(param.grad):
        param.grad = param.grad.float()
