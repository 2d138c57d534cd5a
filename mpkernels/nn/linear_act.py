"""A linear layer and its activation as one module."""

from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Linear, Module, Parameter

from mpkernels import functional
from mpkernels._shared.dtypes import dtype_of
from mpkernels.linear import arguments
from mpkernels.ops.linear.activations import ActivationLike, activation_name, hooks_of


class LinearAct(Module):
    """A linear layer and its activation in one module, computed by ``mpkernels.functional.linear_act``.

    Parameters, their names, initialisation and checkpoints are those of ``torch.nn.Linear``. The class isn't a subclass
    of it: tools that replace or wrap every Linear would lose the activation, or add their part after the activation
    instead of before it. So adapters, quantisers and torch's tensor parallelism leave this layer alone, or refuse it.
    For them, ``to_linear`` returns a Linear; ``mpkernels.nn.parallel`` has tensor parallelism for it. If your own code
    initialises every ``torch.nn.Linear``, name LinearAct there, too.

    Args:
        in_features: how long the last dimension of the input is.
        out_features: how long the last dimension of the output is.
        bias: whether there is a bias.
        device: where the parameters are made.
        dtype: which dtype the parameters have.
        activation: none, relu, relu2 (the square of relu), gelu, gelu_tanh, silu, sigmoid or tanh. Or a module of torch
            or transformers that computes one of these, such as ``torch.nn.GELU()``.
    """

    in_features: int
    out_features: int
    weight: Tensor
    bias: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | str | None = None,
        *,
        activation: ActivationLike = "gelu",
    ) -> None:
        super().__init__()
        widths = {"in_features": in_features, "out_features": out_features}
        arguments.layer(type(self).__name__, widths, bias, device, dtype)
        self.in_features, self.out_features = in_features, out_features
        self.activation = activation_name("LinearAct", activation)
        options: dict[str, Any] = {"device": device, "dtype": dtype_of(dtype)}
        self.weight = Parameter(torch.empty(out_features, in_features, **options))
        self.register_parameter("bias", Parameter(torch.empty(out_features, **options)) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weight and bias anew, as ``torch.nn.Linear`` does."""
        Linear.reset_parameters(self)  # type: ignore[arg-type]

    @classmethod
    def from_linear(cls, linear: Linear, activation: ActivationLike = "gelu") -> "LinearAct":
        """Return a LinearAct that shares the parameters of ``linear`` and applies ``activation`` to its output.

        A Linear with hooks, parametrizations or further tensors is refused, because these would be lost. Convert the
        layer before you add them.
        """
        who = "LinearAct.from_linear"
        if not isinstance(linear, Module):
            raise TypeError(f"{who}: linear must be a torch.nn.Linear, got {linear!r}{arguments.hint(linear)}")
        _refuse_what_would_be_lost(f"{who}: linear", linear, Linear)
        activation = activation_name(who, activation)
        made = cls(linear.in_features, linear.out_features, linear.bias is not None, "meta", activation=activation)
        return _share(linear, made)

    def to_linear(self) -> Linear:
        """Return a ``torch.nn.Linear`` that shares the parameters. Its output lacks the activation: apply it
        yourself."""
        _refuse_what_would_be_lost("LinearAct.to_linear: the layer", self, LinearAct)
        return _share(self, Linear(self.in_features, self.out_features, self.bias is not None, "meta"))

    def forward(self, input: Tensor) -> Tensor:
        """Return ``activation(F.linear(input, weight, bias))``."""
        return functional.linear_act(input, self.weight, self.bias, self.activation)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"activation={self.activation!r}"
        )


_Layer = TypeVar("_Layer", Linear, LinearAct)


def _share(layer: Linear | LinearAct, made: _Layer) -> _Layer:
    for name in ("weight", "bias"):
        setattr(made, name, getattr(layer, name))
    return made.train(layer.training)


def _refuse_what_would_be_lost(which: str, layer: Module, kind: type[Module]) -> None:
    """Raise if the layer has more than weight and bias: nothing else goes into the converted layer."""
    if type(layer) is not kind:
        raise TypeError(
            f"{which} must be a plain {kind.__name__}, got {type(layer).__name__}, whose parametrizations or forward "
            "would be lost: convert before they are added"
        )
    tensors = [*layer.named_parameters("", False, False), *layer.named_buffers("", False, False)]
    beside = hooks_of(layer) + [name for name, _ in tensors if name not in ("weight", "bias")]
    beside += [*dict(layer.named_children()), *({"forward", "weight", "bias"} & vars(layer).keys())]
    if beside:
        raise ValueError(
            f"{which} must have a weight and a bias alone, got {', '.join(beside)}, which would be lost: convert "
            "before they are added"
        )
