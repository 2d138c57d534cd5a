"""The fp32 parameters that a wrapped optimizer sees in place of 16-bit ones while it steps, loads or saves."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.weak import WeakIdKeyDictionary

from mpkernels._shared.parameters import is_sharded
from mpkernels._torch_private.ops import foreach_copy_, foreach_mul_
from mpkernels._torch_private.tensors import base_of
from mpkernels.distributed.parts import part_of, parts_of, placed_as
from mpkernels.ops.step.split import join_each, split_each
from mpkernels.optim import wrappable
from mpkernels.optim.masters import needs_master
from mpkernels.optim.offload.copies import uninterrupted


class WideWeights:
    """One fp32 parameter for each 16-bit one, the same for life, because some classes remember parameters or their ids.
    It has memory only while the optimizer steps it. Both share what anybody notes on one of them as an attribute."""

    def __init__(self) -> None:
        self._wide_of: Any = WeakIdKeyDictionary()

    def __getstate__(self) -> dict[str, Any]:
        return {"wide_of": dict(self._wide_of)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._wide_of = WeakIdKeyDictionary(state["wide_of"])

    @torch.no_grad()
    def cover(self, optimizer: Any, params: Sequence[Tensor]) -> None:
        """Make an fp32 parameter for each of these that has 16 bits by now; raise if the optimizer keeps one elsewhere
        than in its groups. Tensors of the parameter's dtype and shape that are noted on it become fp32, as states do,
        but for views and those that need grads: the optimizer didn't make these."""
        new = dict.fromkeys(param for param in params if needs_master(param) and param not in self._wide_of)
        if new:
            wrappable.refuse_one_that_holds(optimizer, list(new))
        for param in new:
            part = _same_everywhere(part_of(param), {})
            self._wide_of[param] = wide = Parameter(placed_as(param, part), requires_grad=param.requires_grad)
            parts_of([wide])[0].data = part.new_empty(0)
            for key, note in vars(param).items():
                is_like = isinstance(note, Tensor) and (note.dtype, note.shape) == (param.dtype, param.shape)
                if is_like and not note.requires_grad and base_of(note) is None:
                    setattr(param, key, note.float())

    @contextmanager
    def shown_to(
        self, optimizer: Any, params: Iterable[Tensor], masters: Mapping[Tensor, Tensor] = MappingProxyType({})
    ) -> Iterator[None]:
        """Inside this context, have the optimizer's groups and states hold fp32 parameters instead of these 16-bit
        ones. They hold these masters, others NaN. Setting a parameter's ``data`` to fp32 instead would take DDP's hooks
        off it. Ctrl-C waits for the end."""
        wide_of = {param: self._wide_of[param] for param in params if needs_master(param)}
        wide = parts_of(list(wide_of.values()))
        numbers: dict[torch.device, Tensor] = {}
        with uninterrupted():
            try:
                for (param, it), part, own in zip(wide_of.items(), wide, parts_of(list(wide_of)), strict=True):
                    if it.requires_grad != param.requires_grad:
                        it.requires_grad_(param.requires_grad)
                    it.__dict__ = vars(param)
                    part.data = masters[param] if param in masters else _same_everywhere(own, numbers)
                _rename(optimizer, wide_of)
                yield
            finally:
                _rename(optimizer, {it: param for param, it in wide_of.items()})
                for it, part in zip(wide_of.values(), wide, strict=True):
                    it.grad = None
                    part.data = part.new_empty(0)

    def step(self, optimizer: Any, groups: list[dict[str, Any]], factor: float) -> None:
        """Have the optimizer step these of its groups, with grads that are multiplied by the factor. It steps fp32
        weights in place of 16-bit ones, whose states must hold remainders; then the weights are rounded. If the step
        raises, what it has done so far is kept, as with fp32 parameters."""
        params = list(dict.fromkeys(param for group in groups for param in group["params"]))
        narrow = [param for param in params if param.grad is not None and needs_master(param)]
        all_groups, grads = optimizer.param_groups, {}
        if factor != 1:
            grads = {param: param.grad for param in params if param.grad is not None and not needs_master(param)}
        with uninterrupted():
            try:
                for param, grad in grads.items():
                    param.grad = placed_as(param, part_of(grad) * factor)
                optimizer.param_groups = groups
                self._step_wide(optimizer, params, narrow, factor)
            finally:
                optimizer.param_groups = all_groups
                for param, grad in grads.items():
                    param.grad = grad

    def _step_wide(self, optimizer: Any, params: list[Tensor], narrow: list[Tensor], factor: float) -> None:
        """Have the optimizer step with fp32 copies of the narrow parameters' true weights and grads; then round."""
        remainders = [optimizer.state[param]["remainder"] for param in narrow]
        weights, parts = parts_of([param.detach() for param in narrow]), parts_of(remainders)
        masters = dict(zip(narrow, join_each(weights, parts), strict=True))
        with self.shown_to(optimizer, params, masters):
            wide = [self._wide_of[param] for param in narrow]
            grads = _wide_grads(parts_of([param.grad for param in narrow]), factor)
            for it, grad in zip(wide, grads, strict=True):
                it.grad = placed_as(it, grad)
            try:
                for it in wide:
                    del optimizer.state[it]["remainder"]  # optimizers test whether a state is empty
                optimizer.step()
            finally:
                for it, remainder in zip(wide, remainders, strict=True):
                    optimizer.state.setdefault(it, {})["remainder"] = remainder
                split_each(parts_of([wide_param.detach() for wide_param in wide]), weights, parts)
                torch.autograd.graph.increment_version([param for param in narrow if is_sharded(param)])


def _same_everywhere(part: Tensor, numbers: dict[torch.device, Tensor]) -> Tensor:
    """Return NaN in the part's shape, in the memory of one number: whoever reads or steps a parameter that has no grad
    is to notice. numbers: those made so far."""
    if part.device not in numbers:
        numbers[part.device] = torch.full((), torch.nan, dtype=torch.float32, device=part.device)
    return numbers[part.device].expand(part.shape)


def _rename(optimizer: Any, names: Mapping[Tensor, Tensor]) -> None:
    for group in optimizer.param_groups:
        group["params"][:] = [names.get(it, it) for it in group["params"]]
    for old, new in names.items():
        if old in optimizer.state:
            optimizer.state[new] = optimizer.state.pop(old)


def _wide_grads(grads: list[Tensor], factor: float) -> list[Tensor]:
    if not grads or any(grad.layout is not torch.strided for grad in grads):  # foreach ops refuse an empty list
        return [grad.float() * factor for grad in grads]
    # Copies, also of fp32 grads: what follows must not change the user's.
    wide = [torch.empty_like(grad, dtype=torch.float32) for grad in grads]
    foreach_copy_(wide, grads)
    if factor != 1:
        foreach_mul_(wide, factor)
    return wide
