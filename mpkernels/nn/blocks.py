"""Gated layers and MLPs as modules."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, Module, Parameter

from mpkernels import functional
from mpkernels._shared.dtypes import dtype_of
from mpkernels.linear import arguments
from mpkernels.ops.linear.activations import ActivationLike, activation_name


class _Layers(Module):
    """A module that holds the weights and biases of linear layers, each as ``<layer>_weight`` and ``<layer>_bias``. It
    holds no ``torch.nn.Linear``: tools would replace or wrap such a layer, but its forward is never called."""

    gate_weight: Tensor
    up_weight: Tensor
    gate_bias: Tensor | None
    up_bias: Tensor | None

    def __init__(self, activation: ActivationLike) -> None:
        super().__init__()
        self.activation = activation_name(type(self).__name__, activation)
        self._layers: list[str] = []

    def _add(self, layer: str, inputs: int, outputs: int, bias: bool, device: Any, dtype: Any) -> None:
        for name, shape in (("weight", (outputs, inputs)), ("bias", (outputs,) if bias else None)):
            param = None if shape is None else Parameter(torch.empty(shape, device=device, dtype=dtype_of(dtype)))
            self.register_parameter(f"{layer}_{name}", param)
        self._layers.append(layer)

    def reset_parameters(self) -> None:
        """Draw all weights and biases anew, layer by layer, as ``torch.nn.Linear`` does."""
        for layer in self._layers:
            weight, bias = getattr(self, f"{layer}_weight"), getattr(self, f"{layer}_bias")
            Linear.reset_parameters(SimpleNamespace(weight=weight, bias=bias))  # type: ignore[arg-type]


class GatedLinear(_Layers):
    """A gated linear layer, ``activation(gate(x)) * up(x)``, computed by ``mpkernels.functional.gated_linear``: SwiGLU
    with silu, GEGLU with gelu or gelu_tanh, ReGLU with relu.

    The parameters are ``gate_weight``, ``up_weight``, ``gate_bias`` and ``up_bias``. They are initialised as those of
    two ``torch.nn.Linear``, the gate's first.

    Args:
        in_features: how many features x has.
        out_features: how many features the result has.
        bias: whether both linear layers have a bias.
        device: where the parameters are made.
        dtype: which dtype the parameters have.
        activation: as LinearAct takes it.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | str | None = None,
        *,
        activation: ActivationLike = "silu",
    ) -> None:
        widths = {"in_features": in_features, "out_features": out_features}
        arguments.layer(type(self).__name__, widths, bias, device, dtype)
        super().__init__(activation)
        self.in_features, self.out_features = in_features, out_features
        for layer in ("gate", "up"):
            self._add(layer, in_features, out_features, bias, device, dtype)
        self.reset_parameters()

    def forward(self, input: Tensor) -> Tensor:
        """Return ``activation(gate(input)) * up(input)``."""
        return functional.gated_linear(
            input, self.gate_weight, self.up_weight, self.gate_bias, self.up_bias, self.activation
        )

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.gate_bias is not None}, "
            f"activation={self.activation!r}"
        )


class MLP(_Layers):
    """Two linear layers with an activation and a dropout between them, computed by ``mpkernels.functional.mlp``; or,
    with ``gated=True``, a gated layer, a dropout and a linear layer, by ``mpkernels.functional.gated_mlp``.

    The parameters are ``fc1_weight``, ``fc1_bias``, ``fc2_weight`` and ``fc2_bias``; of a gated MLP those of
    ``GatedLinear``, ``down_weight`` and ``down_bias``. They are initialised as those of ``torch.nn.Linear``, in this
    order.

    Args:
        in_features: how many features x has.
        hidden_features: how many features the activation has.
        out_features: how many features the result has; by default as many as x.
        bias: whether each layer has a bias.
        device: where the parameters are made.
        dtype: which dtype the parameters have.
        activation: as LinearAct takes it; gelu by default, silu if gated.
        gated: whether to make a gated MLP.
        dropout: the probability of dropping a hidden feature in training.
        recompute: save less for the backward, as ``mpkernels.functional.mlp`` says.
    """

    fc1_weight: Tensor
    fc1_bias: Tensor | None
    fc2_weight: Tensor
    fc2_bias: Tensor | None
    down_weight: Tensor
    down_bias: Tensor | None

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | str | None = None,
        *,
        activation: ActivationLike | None = None,
        gated: bool = False,
        dropout: float = 0.0,
        recompute: bool = False,
    ) -> None:
        who, widths = type(self).__name__, {"in_features": in_features, "hidden_features": hidden_features}
        arguments.layer(who, widths, bias, device, dtype)
        out_features = in_features if out_features is None else out_features
        arguments.width(who, "out_features", out_features, "an int or None")
        arguments.flag(who, "gated", gated)
        arguments.flag(who, "recompute", recompute)
        arguments.probability(who, "dropout", dropout)
        super().__init__(("silu" if gated else "gelu") if activation is None else activation)
        self.in_features, self.hidden_features, self.out_features = in_features, hidden_features, out_features
        self.gated, self.dropout, self.recompute = gated, dropout, recompute
        for layer in ("gate", "up") if gated else ("fc1",):
            self._add(layer, in_features, hidden_features, bias, device, dtype)
        self._add("down" if gated else "fc2", hidden_features, out_features, bias, device, dtype)
        self.reset_parameters()

    def forward(self, input: Tensor) -> Tensor:
        """Return the MLP of ``input``, whose last dimension has ``in_features``."""
        options = self.activation, self.dropout, self.training, self.recompute
        if not self.gated:
            return functional.mlp(input, self.fc1_weight, self.fc1_bias, self.fc2_weight, self.fc2_bias, *options)
        return functional.gated_mlp(
            input, self.gate_weight, self.up_weight, self.down_weight, self.gate_bias, self.up_bias, self.down_bias,
            *options,
        )  # fmt: skip

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, hidden_features={self.hidden_features}"
        has_bias = getattr(self, f"{self._layers[0]}_bias") is not None
        return (
            f"{sizes}, out_features={self.out_features}, bias={has_bias}, activation={self.activation!r}, "
            f"gated={self.gated}, dropout={self.dropout}, recompute={self.recompute}"
        )
