"""The activations that linear_act knows: formulas that lose nothing to cancellation, and let NaN pass."""

from collections.abc import Callable
from functools import partial
from math import pi, sqrt
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from mpkernels._torch_private.ops import gelu_


class Activation(NamedTuple):
    forward: Callable[[Tensor], Tensor]  #: z -> y
    backward: Callable[[Tensor, Tensor], Tensor]  #: dy, saved -> dz
    saves: Literal["z", "y", ""]  #: what backward gets as saved: y where y tells as much as z


def _relu(z: Tensor) -> Tensor:
    return torch.where(z <= 0, 0, z)  # NaN passes


def _relu_backward(dy: Tensor, y: Tensor) -> Tensor:
    """Return torch.where(y <= 0, 0, dy), whose derivative by y is 0; of torch.where y would be no part."""
    dz: Tensor = torch.ops.aten.threshold_backward(dy, y, 0)
    return dz


def _gelu(z: Tensor) -> Tensor:
    return 0.5 * z * torch.erfc(z * -sqrt(0.5))


def _gelu_backward(dy: Tensor, z: Tensor) -> Tensor:
    density = torch.exp(-0.5 * z * z) / sqrt(2 * pi)
    return dy * (0.5 * torch.erfc(z * -sqrt(0.5)) + z * density)


LINEAR = 2 * sqrt(2 / pi)  # tanh-GELU is z sigmoid(LINEAR z + CUBIC z^3)
CUBIC = LINEAR * 0.044715


def _bounded_square(z: Tensor) -> Tensor:
    """Return z^2, bounded where the sigmoid is saturated anyway: else inf times 0 would make NaN of a finite z."""
    return (z * z).clamp(max=1e30)


def _gelu_tanh(z: Tensor) -> Tensor:
    return z * torch.sigmoid(z * (LINEAR + CUBIC * _bounded_square(z)))


def _gelu_tanh_backward(dy: Tensor, z: Tensor) -> Tensor:
    square = _bounded_square(z)
    exponent = z * (LINEAR + CUBIC * square)
    s, one_minus_s = torch.sigmoid(exponent), torch.sigmoid(-exponent)  # 1 - s would cancel
    return dy * (s + z * s * one_minus_s * (LINEAR + 3 * CUBIC * square))


def _silu_backward(dy: Tensor, z: Tensor) -> Tensor:
    return dy * torch.sigmoid(z) * (1 + z * torch.sigmoid(-z))


ACTIVATIONS = {
    "none": Activation(lambda z: z, lambda dy, saved: dy, ""),
    "relu": Activation(_relu, _relu_backward, "y"),
    "relu2": Activation(lambda z: _relu(z).square(), lambda dy, z: torch.where(z <= 0, 0, 2 * z * dy), "z"),
    "gelu": Activation(_gelu, _gelu_backward, "z"),
    "gelu_tanh": Activation(_gelu_tanh, _gelu_tanh_backward, "z"),
    "silu": Activation(lambda z: z * torch.sigmoid(z), _silu_backward, "z"),
    "sigmoid": Activation(torch.sigmoid, lambda dy, y: dy * y * (1 - y), "y"),
    "tanh": Activation(torch.tanh, lambda dy, y: dy * (1 - y * y), "y"),
}

# torch's own functions for y of z: into new memory, or into z's.
AFRESH: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda z: z,
    "relu": torch.relu,
    "relu2": lambda z: (y := torch.relu(z)) * y,  # CUDA's autocast makes fp32 of square(), which is pow
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "silu": functional.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}
IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda z: z,
    "relu": torch.relu_,
    "relu2": lambda z: z.relu_().square_(),
    "gelu": gelu_,
    "gelu_tanh": partial(gelu_, approximate="tanh"),
    "silu": partial(functional.silu, inplace=True),
    "sigmoid": torch.sigmoid_,
    "tanh": torch.tanh_,
}

ActivationLike = str | nn.Module | type[nn.Module]
_NAMES: dict[object, str] = {
    nn.Identity: "none",
    nn.ReLU: "relu",
    nn.GELU: "gelu",
    nn.SiLU: "silu",
    nn.Sigmoid: "sigmoid",
    nn.Tanh: "tanh",
}
_NAMES_IN_TRANSFORMERS = {
    "LinearActivation": "none",
    "ReLUSquaredActivation": "relu2",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",  # in version 4
    "NewGELUActivation": "gelu_tanh",
    "FastGELUActivation": "gelu_tanh",
    "AccurateGELUActivation": "gelu_tanh",
    "SiLUActivation": "silu",
}


def activation_name(op: str, activation: object) -> str:
    """Return the name in ACTIVATIONS of an activation, given by that name, as a module or as a module's class."""
    if isinstance(activation, str):
        check_activation(op, activation)
        return activation
    name = module_activation(activation)
    if name is None:
        raise _unknown(op, activation)
    if isinstance(activation, nn.Module) and (hooks := hooks_of(activation)):
        raise ValueError(f"{op}: activation must have no hooks, which nobody would call, got {', '.join(hooks)}")
    return name


def module_activation(activation: object) -> str | None:
    """Return the name in ACTIVATIONS of a module, or of a module's class. Return None for anything else."""
    kind = activation if isinstance(activation, type) else type(activation)
    name = _NAMES.get(kind)
    if name is None and kind.__module__ == "transformers.activations":
        return _NAMES_IN_TRANSFORMERS.get(kind.__name__)
    is_approximate = type(activation) is nn.GELU and activation.approximate == "tanh"
    return "gelu_tanh" if is_approximate else name


def hooks_of(module: nn.Module) -> list[str]:
    return [name for name, value in vars(module).items() if name.endswith("_hooks") and value]


def check_activation(op: str, activation: object) -> None:
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise _unknown(op, activation)


def _unknown(op: str, activation: object) -> ValueError:
    return ValueError(f"{op}: activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
