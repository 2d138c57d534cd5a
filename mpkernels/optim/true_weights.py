"""Shows a model's fp32 weights, which optimizers of ours hold, to code that averages or saves weights."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from mpkernels._shared.call_model import refuse_no_model
from mpkernels._shared.parameters import params_of, unwrapped
from mpkernels.optim.masters import needs_master, true_weight
from mpkernels.optim.skipping_optimizer import SkippingOptimizer


class TrueWeights:
    """A model as averages of weights read it, with the fp32 master of each 16-bit weight in its place.

    >>> average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999)).float()
    >>> average.update_parameters(TrueWeights(model, optimizer))  # after each step

    timm's ``ModelEmaV3(model, dtype=torch.float32).update`` takes it likewise, diffusers' ``EMAModel`` its
    ``parameters()``, and whatever else calls ``parameters``, ``buffers``, their named forms or ``state_dict``. The
    masters are made anew for each call, in 4 bytes a parameter for as long as the caller keeps them. A 16-bit buffer,
    or a weight that no optimizer here has stepped, comes as it is, but in fp32.

    Args:
        model: the model that trains.
        optimizers: those of ``mpkernels.optim`` that step its weights, ``Masters`` included.
    """

    def __init__(self, model: Module, *optimizers: torch.optim.Optimizer) -> None:
        refuse_no_model("TrueWeights", model)
        self._model = model
        self._optimizers: list[Any] = [unwrapped(optimizer) for optimizer in optimizers]
        for optimizer in self._optimizers:
            if not isinstance(optimizer, SkippingOptimizer):
                raise TypeError(
                    f"TrueWeights: optimizers must be of mpkernels.optim, got {type(optimizer).__name__}, which has "
                    "no masters"
                )

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Yield what the model's method yields, with masters."""
        states = {
            param: optimizer.state.get(param, {}) for optimizer in self._optimizers for param in params_of(optimizer)
        }
        for name, param in self._model.named_parameters(*args, **kwargs):
            weight = _in_fp32(param, states.get(param, {}))
            yield name, weight.requires_grad_(param.requires_grad)  # diffusers copies those that need no grad

    def parameters(self, recurse: bool = True) -> Iterator[Tensor]:
        """Yield what the model's method yields, with masters."""
        for _, weight in self.named_parameters(recurse=recurse):
            yield weight

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Yield what the model's method yields, in fp32."""
        for name, buffer in self._model.named_buffers(*args, **kwargs):
            yield name, _in_fp32(buffer, {})

    def buffers(self, recurse: bool = True) -> Iterator[Tensor]:
        """Yield what the model's method yields, in fp32."""
        for _, buffer in self.named_buffers(recurse=recurse):
            yield buffer

    def state_dict(self) -> dict[str, Any]:
        """Return the model's state dict, with masters and in fp32."""
        saved, options = self._model.state_dict(), {"remove_duplicate": False}
        in_fp32 = dict(self.named_parameters(**options)) | dict(self.named_buffers(**options))
        return saved | {key: in_fp32[key].detach() for key in saved if key in in_fp32}


def _in_fp32(tensor: Tensor, state: Mapping[str, Tensor]) -> Tensor:
    return true_weight(tensor, dict(state)).float() if needs_master(tensor) else tensor
