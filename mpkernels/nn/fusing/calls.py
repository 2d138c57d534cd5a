"""What a rewritten forward calls: whether its layers still are plain, and the fused op over them."""

from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Any, NamedTuple

from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import Linear, Module

from mpkernels import functional
from mpkernels._torch_private.modes import is_function_mode_active
from mpkernels._torch_private.modules import are_all_modules_hooked
from mpkernels._torch_private.tracing import is_exporting, is_jit_tracing
from mpkernels.nn.fusing.originals import CHUNK, DROPOUT, GATE, SQUARE, TORCH_CHUNK, are_in_place
from mpkernels.nn.fusing.originals import GELU as GELU  # for rewritten forwards
from mpkernels.nn.fusing.recognise import (
    PLAIN_TENSORS,
    drops,
    known_activation,
    why_no_activation,
    why_no_layer,
    why_not_passing,
)
from mpkernels.ops.linear.block_kind import Kind, Parameters

Layers = Sequence[Module]
Between = Sequence[Any]


def are_plain(x: Any, layers: Layers, activation: object, between: Between = ()) -> bool:
    """Return whether one op can replace the calls of these modules: each computes just what torch defines, and no hook
    or mode watches. ``between`` may hold one dropout; the other modules in it must return their input."""
    if type(x) not in PLAIN_TENSORS or why_no_activation(activation) is not None:
        return False
    for layer in layers:
        if why_no_layer(layer) is not None:
            return False
    dropping = 0
    for called in between:
        if why_not_passing(called) is not None:
            return False
        dropping += called is DROPOUT or drops(called)
    if dropping > 1:
        return False
    return not (
        are_all_modules_hooked()
        or is_function_mode_active()
        or is_exporting()
        or (not is_compiling() and is_jit_tracing())
    )


class Method(NamedTuple):
    """A method of a plain class as it was when it was fused."""

    kind: type
    name: str
    value: Any
    written: Any  #: the function that the value's decorators wrap


def by_replacement(method: Method, values: Mapping[str, Any]) -> Any:
    """Call the new method with the old one's arguments. Its defaults and their order may differ. So arguments that had
    a default are passed by name, and left out if they equal the old default."""
    parameters = signature(method.written).parameters.values()
    is_longer = any(
        param.kind is param.VAR_POSITIONAL and values[param.name] for param in parameters
    )  # so none has its default
    positional, named = list[Any](), dict[str, Any]()
    for parameter in parameters:
        value = values[parameter.name]
        if parameter.kind is parameter.VAR_POSITIONAL:
            positional += value
        elif parameter.kind is parameter.VAR_KEYWORD:
            named |= value
        elif parameter.kind is not parameter.KEYWORD_ONLY and (is_longer or parameter.default is parameter.empty):
            positional.append(value)
        elif value is not parameter.default:
            named[parameter.name] = value
    return getattr(method.kind, method.name)(*positional, **named)


def are_gates(layers: Layers, chunk: object = TORCH_CHUNK) -> bool:
    """Return whether torch's own methods multiply the gate and, if one layer makes both factors, chunk its output."""
    replaceable = GATE if len(layers) == 2 else (*GATE, *CHUNK)
    return chunk is TORCH_CHUNK and are_in_place(replaceable) and are_halves(layers)


def is_relu_to_square(activation: object) -> bool:
    """Return whether this is a plain ReLU, and torch's own methods square its result."""
    is_plain = why_no_activation(activation) is None and known_activation(activation) == "relu"
    return is_plain and are_in_place(SQUARE)


def are_ordinary(*values: object) -> bool:
    """Return whether operators on these values only compute, and run no code of a user's class."""
    for value in values:  # noqa: SIM110 (torch.compile breaks at a generator)
        if type(value) not in _ORDINARY:
            return False
    return True


_ORDINARY = (*PLAIN_TENSORS, int, float, bool, type(None))


def are_halves(layers: Layers) -> bool:
    """Return whether the gate and its other factor are equally wide, so that neither is broadcast. ``layers`` are two
    layers, or one that makes both factors."""
    first, *second = (_parameters(layer)[0].shape[0] for layer in layers)
    return second == [first] if second else first % 2 == 0


def fused(kind: str, x: Tensor, layers: Layers, activation: object, *options: Any, **named: Any) -> Tensor:
    """Compute by the op of this kind what calls of these modules compute. The options are those of ``block_of``."""
    block, params = block_of(kind, layers, activation, *options, **named)
    op: Callable[..., Tensor] = getattr(functional, kind)
    given = [params[at] for at in _TAKES[kind]]
    return op(x, *given, block.activation, *[block.dropout] * kind.endswith("mlp"))


_TAKES = {"linear_act": (0, 1), "mlp": (0, 1, 4, 5), "gated_linear": (0, 2, 1, 3), "gated_mlp": (0, 2, 4, 1, 3, 5)}
"""Which of the Parameters an op takes, in its arguments' order."""


def block_of(
    kind: str,
    layers: Layers,
    activation: object,
    between: Between = (),
    dropout: float = 0.0,
    training: bool = False,
    is_gate_last: bool = False,
) -> tuple[Kind, Parameters]:
    """Return what computes calls of these modules. ``dropout`` and ``training`` are those of torch's dropout function
    if ``between`` holds it. Gate and up may be two layers, or one that holds the rows of both."""
    pairs, is_gated = [_parameters(layer) for layer in layers], kind.startswith("gated")
    if not is_gated:
        pairs.insert(1, (None, None))
    elif len(layers) == 1 + kind.endswith("mlp"):
        pairs[:1] = _taken_apart(*pairs[0], is_gate_last)
    for called in between:
        if drops(called):
            dropout, training = called.p, True
    params = Parameters(*[it for weight_and_bias in pairs for it in weight_and_bias])
    is_stacked = is_gated and params.up_weight is None
    return Kind(kind, known_activation(activation), is_gated, is_stacked, dropout if training else 0.0), params


def _parameters(layer: Any) -> tuple[Any, Any]:
    weight: Tensor = layer.weight
    return (weight if type(layer) is Linear else weight.t()), layer.bias


def _taken_apart(weight: Tensor, bias: Tensor | None, is_gate_last: bool) -> list[Any]:
    """Return the parameters of gate and up from those of the one layer that holds both."""
    if not is_gate_last:
        return [(weight, bias), (None, None)]  # the ops take the joint weight
    up, gate = weight.chunk(2)
    up_bias, gate_bias = (None, None) if bias is None else bias.chunk(2)
    return [(gate, gate_bias), (up, up_bias)]
