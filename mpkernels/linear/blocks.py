"""Gated layers and MLPs as functions."""

from collections.abc import Hashable
from typing import Any

from torch import Tensor
from torch.overrides import is_tensor_like

from mpkernels import selector
from mpkernels._torch_private.modes import is_any_autocast_enabled
from mpkernels.linear import arguments, block, block_choice
from mpkernels.linear.block_kind import Kind, Parameters
from mpkernels.linear.choice import autocast_dtype
from mpkernels.linear.served import is_ours, is_watched
from mpkernels.ops.linear.activations import ActivationLike, activation_name


def gated_linear(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor | None = None,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    activation: ActivationLike = "silu",
) -> Tensor:
    """Return ``activation(F.linear(x, gate_weight, gate_bias)) * F.linear(x, up_weight, up_bias)``: SwiGLU with silu,
    GEGLU with gelu or gelu_tanh, ReGLU with relu.

    It is computed in fp32 and rounded once. For the backward, the results of both linear layers are saved, where
    torch saves the activation's result, too. Shapes, autocast, gradients of any order and torch.compile work as with
    torch's functions. If plain torch is faster for a call, torch computes it and rounds in its own way.

    Args:
        x: [..., K].
        gate_weight: [N, K], possibly a transposed view of [K, N]. Without up_weight it is [2N, K]: gate's rows, and
            then up's, as in Phi-3 and Megatron. Nothing is copied.
        up_weight: the weight that makes the other factor, [N, K].
        gate_bias: [N], or [2N] without up_weight.
        up_bias: [N].
        activation: as linear_act takes it.
    """
    kind = "gated_linear", activation, True, up_weight is None, 0.0, False
    return _compute(kind, x, gate_weight, gate_bias, up_weight, up_bias, None, None)


def mlp(
    x: Tensor,
    fc1_weight: Tensor,
    fc1_bias: Tensor | None,
    fc2_weight: Tensor,
    fc2_bias: Tensor | None,
    activation: ActivationLike = "gelu",
    dropout: float = 0.0,
    training: bool = True,
    recompute: bool = False,
) -> Tensor:
    """Return ``F.linear(F.dropout(activation(F.linear(x, fc1_weight, fc1_bias)), dropout, training), fc2_weight,
    fc2_bias)``.

    Beside x and the weights, the backward needs one tensor: what the activation was taken of. In 16 bits these are 2
    bytes for each hidden feature, where torch saves 4. The activation's result is computed anew, and its gradient
    never reaches memory where a kernel can help it. A dropout saves its mask, another byte. Shapes, autocast, gradients
    of any order and torch.compile work as with torch's functions. If plain torch is faster, torch computes the call.

    Args:
        x: [..., K].
        fc1_weight: [H, K], possibly a transposed view, as ``weight.t()`` of GPT-2's Conv1D.
        fc1_bias: [H].
        fc2_weight: [N, H], possibly a transposed view, too.
        fc2_bias: [N].
        activation: as linear_act takes it.
        dropout: the probability of dropping a hidden feature.
        training: whether to drop any.
        recompute: save x alone, and compute the first linear layer anew in the backward.
    """
    kind = "mlp", activation, False, False, *_options("mlp", dropout, training, recompute)
    return _compute(kind, x, fc1_weight, fc1_bias, None, None, fc2_weight, fc2_bias)


def gated_mlp(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor | None,
    down_weight: Tensor,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: ActivationLike = "silu",
    dropout: float = 0.0,
    training: bool = True,
    recompute: bool = False,
) -> Tensor:
    """Return ``F.linear(F.dropout(gated_linear(x, ...), dropout, training), down_weight, down_bias)``, the MLP of
    Llama.

    Beside x and the weights, the backward needs the results of gate's and up's linear layers: in 16 bits 4 bytes for
    each hidden feature, where torch saves 8. See ``gated_linear`` for the first arguments and ``mlp`` for the last.
    """
    kind = "gated_mlp", activation, True, up_weight is None, *_options("gated_mlp", dropout, training, recompute)
    return _compute(kind, x, gate_weight, gate_bias, up_weight, up_bias, down_weight, down_bias)


def _options(op: str, dropout: float, training: bool, recompute: bool) -> tuple[float, bool]:
    """Return the dropout that applies, and ``recompute``."""
    if type(dropout) is not float or type(training) is not bool or type(recompute) is not bool or not 0 <= dropout <= 1:
        arguments.probability(op, "dropout", dropout)
        arguments.flag(op, "training", training)
        arguments.flag(op, "recompute", recompute)
    return dropout if training else 0.0, recompute


_NAMES = {
    "gated_linear": ("gate_weight", "gate_bias", "up_weight", "up_bias", "", ""),
    "mlp": ("fc1_weight", "fc1_bias", "", "", "fc2_weight", "fc2_bias"),
    "gated_mlp": ("gate_weight", "gate_bias", "up_weight", "up_bias", "down_weight", "down_bias"),
}


def _compute(kind: tuple[Any, ...], x: Tensor, *parameters: Tensor | None) -> Tensor:
    """``kind`` becomes a Kind only where torch doesn't compute at once: that takes as long as the key does."""
    key = block_choice.key_of(kind, x, parameters)
    kernel = selector.by_key.get(key)
    if kernel == "torch" and not kind[-1]:
        return block.by_torch_plainly(kind, x, *parameters)
    if kernel is None or is_watched():
        return _of_any_kind(key, Kind(*kind), x, Parameters(*parameters))
    dtype = autocast_dtype(x) if is_any_autocast_enabled() else None
    return block.compute(kernel, Kind(*kind), x, Parameters(*parameters), dtype)


def _of_any_kind(key: Hashable, kind: Kind, x: Tensor, own: Parameters) -> Tensor:
    kind = kind._replace(activation=activation_name(kind.op, kind.activation))
    given = [it for it in (x, *own) if it is not None]
    if not is_ours(x, *own) and all(map(is_tensor_like, given)):
        return block.by_torch(kind, x, own)
    _check(kind, x, own)
    dtype = autocast_dtype(x)
    return block.compute(block_choice.kernel_for(key, kind, x, own, dtype), kind, x, own, dtype)


def _check(kind: Kind, x: Tensor, own: Parameters) -> None:
    names = Parameters(*_NAMES[kind.op])
    op = kind.op
    for name, it in (("x", x), *zip(names, own, strict=True)):
        if it is not None or ("weight" in name and name != "up_weight"):
            arguments.tensor(op, name, it)
    if x.dim() == 0:
        raise ValueError(f"{op}: x must have at least one dimension, got a scalar")
    if own.weight.dim() != 2 or own.weight.shape[1] != x.shape[-1]:
        wanted = f"(any, {x.shape[-1]})"
        raise ValueError(f"{op}: {names.weight} must have shape {wanted}, got {tuple(own.weight.shape)}")
    rows = own.weight.shape[0]
    if kind.is_stacked and rows % 2:
        raise ValueError(f"{op}: {names.weight} must have gate's rows and as many of up, got {rows}")
    if kind.is_stacked and own.up_bias is not None:
        raise ValueError(f"{op}: up_bias must be None without up_weight: gate_bias holds both")
    shapes: dict[str, tuple[int | str, ...]] = {
        "bias": (rows,),
        "up_weight": tuple(own.weight.shape),
        "up_bias": (rows,),
        "out_weight": ("any", own.sizes(kind)[1]),
        "out_bias": (own.sizes(kind)[2],),
    }
    for field, shape in shapes.items():
        it, name = getattr(own, field), getattr(names, field)
        if it is None:
            continue
        if it.dim() != len(shape) or any(want not in ("any", got) for want, got in zip(shape, it.shape, strict=True)):
            wanted = f"({', '.join(map(str, shape))}{',' * (len(shape) == 1)})"
            raise ValueError(f"{op}: {name} must have shape {wanted}, got {tuple(it.shape)}")
    for name, it in zip(names, own, strict=True):
        if it is not None and it.device != x.device:
            raise ValueError(f"{op}: {name} must be on {x.device}, got {it.device}")
        if it is not None and it.dtype != x.dtype and autocast_dtype(x) is None:
            raise TypeError(f"{op}: {name} must be {x.dtype}, got {it.dtype}")
