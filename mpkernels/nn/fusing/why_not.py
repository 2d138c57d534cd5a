"""Says why no op of ours can stand for a layer, an activation or a dropout."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn import Dropout, Identity, Linear, Module, Parameter

from mpkernels._shared.parameters import is_sharded
from mpkernels._torch_private.modules import runs_forward_alone
from mpkernels.nn.fusing.originals import DROPOUT, is_original
from mpkernels.nn.fusing.recognise import is_conv1d, known_activation

Named = Sequence[tuple[str, Any]]
PLAIN_TENSORS = (Tensor, Parameter)  # no subclasses: for DTensors, quantised weights and stand-ins the plain lines run
_FOREIGN = "holds tensors of another class"
WATCHED = "has hooks, or a forward of its own"
PATCHED = "runs what somebody has put in place of torch's own"


def why_no_layer(layer: Module) -> str | None:
    """Return why this isn't a plain linear layer. None if it is one."""
    if type(layer) is not Linear and not is_conv1d(layer):
        return "is no plain torch.nn.Linear"
    if not runs_forward_alone(layer):
        return WATCHED
    if not is_original(layer):
        return PATCHED
    bias = layer.bias
    if type(layer.weight) not in PLAIN_TENSORS or (bias is not None and type(bias) not in PLAIN_TENSORS):
        return _FOREIGN
    return None


def why_never(layer: Module) -> str | None:
    """Return why_no_layer's reason, but accept DTensors: fully_shard replaces them by plain tensors in a forward."""
    reason = why_no_layer(layer)
    return None if reason is _FOREIGN and is_sharded(layer.weight) else reason


def why_no_activation(activation: object) -> str | None:
    """Return why this isn't one of our activations, unpatched and without hooks. None if it is one."""
    if known_activation(activation) is None:
        return "is no activation that mpkernels knows"
    if isinstance(activation, Module) and not runs_forward_alone(activation):
        return WATCHED
    return None if is_original(activation) else PATCHED


def why_not_passing(value: object) -> str | None:
    """Return why this is neither a plain dropout (a module or torch's function) nor a plain identity. None if it is."""
    if type(value) is not Dropout and type(value) is not Identity:
        return None if value is DROPOUT else "is no plain torch.nn.Dropout or torch.nn.Identity"
    if not runs_forward_alone(value):
        return WATCHED
    return None if is_original(value) else PATCHED


def why_not_fused(layers: Named, activation: Named, between: Named) -> str:
    """Return why no op of ours can replace calls of these named modules and functions. "" if one can."""
    reasons = [(name, why_never(layer)) for name, layer in layers]
    reasons += [(name, why_no_activation(it)) for name, it in activation]
    reasons += [(name, why_not_passing(it)) for name, it in between]
    dropping = sum(it is DROPOUT or (type(it) is Dropout and it.p != 0) for _, it in between)
    twice = "more than one dropout stands between its layers" if dropping > 1 else ""
    return next((f"{name} {why}" for name, why in reasons if why is not None), twice)
