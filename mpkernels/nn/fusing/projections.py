"""Knows diffusers' projections: modules that are a linear layer with an activation, or a gated one, such as the first
module of FeedForward."""

from typing import Any

from torch import Tensor
from torch.nn import Module, Sequential

from mpkernels._torch_private.modules import books_of, runs_forward_alone
from mpkernels.nn.fusing.originals import is_original
from mpkernels.nn.fusing.recognise import PATCHED, WATCHED, is_linear, uses_activation
from mpkernels.nn.fusing.safe_lookup import FUSED, own_values

_HOME = "diffusers.models.activations"
# A gated projection's gate is the second half of its layer's output.
_IS_GATED = {"GELU": False, "LinearActivation": False, "GEGLU": True, "SwiGLU": True}
_ELSEWHERE = ("mps", "npu")  # devices on which a projection's forward may run something else


def is_projection(value: object) -> bool:
    """Return whether this is a projection, or looks like one that mpkernels doesn't know."""
    if not issubclass(type(value), Module) or issubclass(type(value), Sequential) or is_linear(value):
        return False
    children = books_of(own_values(value))[-1].values()
    return _is_known(value) or (sum(map(is_linear, children)) == 1 and uses_activation(value))


def is_gated(projection: Module) -> bool:
    return _IS_GATED.get(type(projection).__name__, False)


def why_no_projection(module: Any) -> str | None:
    """Return why a call of the module may do more than a linear layer and an activation. None if it doesn't."""
    if not _is_known(module):
        return "is none of the modules that fuse takes apart into a layer and an activation"
    if not runs_forward_alone(module) or "gelu" in vars(module):
        return WATCHED
    record = getattr(type(module), FUSED, None)
    return None if is_original(module, type(module) if record is None else record.plain) else PATCHED


def is_usual_on(x: Tensor) -> bool:
    """Return whether projections run their usual code on this tensor's device."""
    return x.device.type not in _ELSEWHERE


def taken_apart(projection: Any) -> tuple[Module, object]:
    """Return the linear layer and the activation."""
    name = type(projection).__name__
    if name == "GELU":
        return projection.proj, {"none": "gelu", "tanh": "gelu_tanh"}.get(projection.approximate)
    return projection.proj, "gelu" if name == "GEGLU" else projection.activation


def _is_known(value: object) -> bool:
    return type(value).__module__ == _HOME and type(value).__name__ in _IS_GATED
