"""Linear layers with an activation, gated layers and MLPs as functions, with the shapes, autocast and gradients of
torch.nn.functional."""

from collections.abc import Hashable

from torch import OutOfMemoryError, Tensor
from torch.overrides import is_tensor_like

from mpkernels import selector
from mpkernels._shared.parameters import is_sharded
from mpkernels._torch_private.modes import is_watched
from mpkernels.distributed.parts import columns_of, parts_of_columns
from mpkernels.linear import arguments, compute_block
from mpkernels.linear.cast_cache import clear as clear_cast_cache
from mpkernels.linear.key_and_case import autocast_dtype, is_ordinary, is_ours, kernel_for, key_in_any_size, key_of
from mpkernels.ops.linear.activations import ACTIVATIONS, ActivationLike, activation_name
from mpkernels.ops.linear.block_kind import Kind, Parameters

_LONE = {name: Kind("linear_act", name) for name in ACTIVATIONS}  # made once, to keep small layers fast

__all__ = ["clear_cast_cache", "gated_linear", "gated_mlp", "linear_act", "mlp"]


def linear_act(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: ActivationLike = "gelu") -> Tensor:
    """Return ``activation(F.linear(x, weight, bias))``.

    Shapes, autocast, gradients of any order, torch.compile and torch.func work as with ``F.linear`` followed by the
    activation. For the backward, one tensor of y's size is saved, as by torch. Where a kernel of ours computes, fp32
    weights get fp32 gradients under autocast that were never rounded to 16 bits. 16-bit weights get such gradients with
    ``weight.grad_dtype = torch.float32``. A gradient lies in memory as its weight does.

    Which calls plain torch computes is written down in the docs of the selector. ``mpkernels.tune`` measures it for a
    model.

    Args:
        x: the input, of any number of dimensions; its last one is in_features long.
        weight: of shape (out_features, in_features).
        bias: of shape (out_features,), or None.
        activation: none, relu, relu2 (the square of relu), gelu, gelu_tanh, silu, sigmoid or tanh. Or a module of torch
            or transformers that computes one of these, such as ``torch.nn.GELU()``.
    """
    kind = (_LONE.get(activation) if type(activation) is str else None) or Kind("linear_act", activation)
    return _compute(kind, x, weight, bias)


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

    For the backward, the results of both linear layers are saved, where torch saves the activation's result, too.
    Shapes, autocast, gradients of any order and torch.compile work as with torch's functions.

    Args:
        x: [..., K].
        gate_weight: [N, K], possibly a transposed view of [K, N]. Without up_weight it is [2N, K]: gate's rows, and
            then up's, as in Phi-3 and Megatron. Nothing is copied.
        up_weight: the weight that makes the other factor, [N, K].
        gate_bias: [N], or [2N] without up_weight.
        up_bias: [N].
        activation: as linear_act takes it.
    """
    kind = Kind("gated_linear", activation, True, up_weight is None)
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
    of any order and torch.compile work as with torch's functions.

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
    kind = Kind("mlp", activation, False, False, *_options("mlp", dropout, training, recompute))
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
    kind = Kind("gated_mlp", activation, True, up_weight is None, *_options("gated_mlp", dropout, training, recompute))
    return _compute(kind, x, gate_weight, gate_bias, up_weight, up_bias, down_weight, down_bias)


def _options(op: str, dropout: float, training: bool, recompute: bool) -> tuple[float, bool]:
    """Return the dropout that applies, and ``recompute``."""
    if type(dropout) is not float or type(training) is not bool or type(recompute) is not bool or not 0 <= dropout <= 1:
        arguments.probability(op, "dropout", dropout)
        arguments.flag(op, "training", training)
        arguments.flag(op, "recompute", recompute)
    return dropout if training else 0.0, recompute


def _compute(kind: Kind, x: Tensor, weight: Tensor, bias: Tensor | None, *others: Tensor | None) -> Tensor:
    params, key = (weight, bias, *others), None
    if is_ordinary(kind, x, weight):
        left = selector.left_to_torch
        if left and key_in_any_size(kind, x, params) in left:
            try:
                return compute_block.by_torch(kind, x, *params)
            except OutOfMemoryError:
                raise
            except (RuntimeError, TypeError):
                arguments.block(kind, x, Parameters(*params))  # names what torch has refused
                raise
        key = key_of(kind, x, weight, bias, others)
        compute = selector.by_key.get(key)
        if compute is not None and (y := compute(x, *params)) is not None:
            return y
    return _compute_checked(key, kind, x, Parameters(*params))


def _compute_checked(key: Hashable, kind: Kind, x: Tensor, params: Parameters) -> Tensor:
    kind = kind._replace(activation=activation_name(kind.op, kind.activation))
    is_lone = kind.op == "linear_act"
    if is_lone and is_sharded(params.weight) and (parts := parts_of_columns(x, *params[:2])) is not None:
        y: Tensor = columns_of(x, params.weight, linear_act(*parts, kind.activation))
        return y
    is_broad = is_lone and isinstance(params.bias, Tensor) and params.bias.dim() > 1
    given = [it for it in (x, *params) if it is not None]
    if (is_broad or not is_ours(x, *params)) and all(map(is_tensor_like, given)):
        try:
            return compute_block.afresh(kind, x, params)
        except RuntimeError:
            if type(x) is Tensor and not x.is_nested:
                arguments.block(kind, x, params)
            raise
    arguments.block(kind, x, params)
    if params.weight.dim() == 1:  # F.linear takes a 1-D weight only without a bias
        if params.bias is None:
            return compute_block.afresh(kind, x, params)
        return compute_block.afresh(kind, x, Parameters(params.weight.unsqueeze(0), params.bias.reshape(1))).squeeze(-1)
    if (
        is_lone and params.bias is not None and params.bias.shape != params.weight.shape[:1]
    ):  # torch broadcasts a bias of one element
        key, params = None, params._replace(bias=params.bias.expand(params.weight.shape[0]))
    dtype, kept = autocast_dtype(x), None if key is None else selector.kept_calls()
    kernel = kernel_for(kind, x, params, dtype, has_key=key is not None)
    if kept is not None and not is_watched():
        kept[key] = compute_block.prepared(kernel, kind, x, params, dtype)
        if (found := kept[key](x, *params[kind.given])) is not None:
            return found  # what later calls compute, too
    return compute_block.compute(kernel, kind, x, params, dtype)
