"""torch.nn's modules, fused."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from mpkernels import functional
from mpkernels.ops._activations import check_activation

_GETATTR = Module.__getattr__


class LinearAct(torch.nn.Linear):
    """``torch.nn.Linear`` and its activation in one: parameters, initialisation and checkpoints are Linear's.

    ``activation``: none, relu, relu2, gelu, gelu_tanh, silu, sigmoid, tanh; see mpkernels.functional.linear_act.
    A tool that replaces every ``torch.nn.Linear``, as quantisers and adapters do, takes this for one and drops the
    activation: keep these layers from it.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        activation: str = "gelu",
    ) -> None:
        check_activation("LinearAct", activation)
        super().__init__(in_features, out_features, bias, device, dtype)
        self.activation = activation

    def forward(self, input: Tensor) -> Tensor:
        # Module.__getattr__ takes as long as all that we add to torch. It is asked where a parameter has been replaced,
        # where a subclass may make its own weight, and where torch.fx has put another there, to write down who asks.
        own: dict[str, Any] = self._parameters
        if type(self) is LinearAct and Module.__getattr__ is _GETATTR and "weight" in own and "bias" in own:
            weight, bias = own["weight"], own["bias"]
        else:
            weight, bias = self.weight, self.bias
        return functional.linear_act(input, weight, bias, self.activation)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activation={self.activation!r}"
