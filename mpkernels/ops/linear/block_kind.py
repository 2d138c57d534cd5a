"""What a linear block is: one or two linear layers, with an activation, a gate and a dropout between them."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpkernels.ops.linear.activations import ACTIVATIONS
from mpkernels.ops.linear.linear_act import _linear_act, _linear_act_backward
from mpkernels.ops.linear.linear_dact import _linear_dact
from mpkernels.ops.linear.linear_gated import _linear_dgated, _linear_gated

# The C++ kernels, with gradients of fp32 weights rounded to 16 bits, as torch rounds them: a CPU needs two products
# for one that isn't rounded.
ROUNDING = "native, gradients rounded"


class Kind(NamedTuple):
    """What a block does with its parameters."""

    op: str  #: the function that the user has called
    activation: Any  #: its name, or what the user gave for it
    is_gated: bool = False
    is_stacked: bool = False  #: gate's and up's parameters are one matrix and one bias, gate's rows first
    dropout: float = 0.0  #: of h
    recompute: bool = False

    @property
    def given(self) -> slice:
        """Return which of the Parameters the op's Function takes: each costs a small layer time."""
        return slice(2 if self.op == "linear_act" else 6)

    @property
    def keeps_z(self) -> bool:
        """Return whether the backward needs z; else h will do."""
        return self.is_gated or ACTIVATIONS[self.activation].saves == "z"


class Parameters(NamedTuple):
    """One entry per parameter: the tensor, or whatever is kept per parameter. A stacked block has no ``up_weight``.
    Without ``out_weight``, h is the result."""

    weight: Any
    bias: Any
    up_weight: Any = None
    up_bias: Any = None
    out_weight: Any = None
    out_bias: Any = None

    def sizes(self, kind: Kind) -> tuple[int, int, int]:
        """Return the number of features of x, of h and of the result."""
        hidden, inputs = self.weight.shape
        hidden = hidden // 2 if kind.is_stacked else hidden
        return inputs, hidden, hidden if self.out_weight is None else self.out_weight.shape[0]


def replaced(params: Sequence[Tensor | None], others: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return ``others``, with the entries of ``params`` where those are None."""
    return [mine if other is None else other for mine, other in zip(params, others, strict=True)]


def grad_dtype(parameter: Tensor) -> torch.dtype:
    """Return the dtype of a gradient: the parameter's, or fp32 if its grad_dtype is. Autograd casts to others."""
    if parameter.dtype == torch.float32:
        return torch.float32
    if torch.compiler.is_compiling() or not parameter.is_leaf:
        return parameter.dtype
    return torch.float32 if parameter.grad_dtype == torch.float32 else parameter.dtype


def lies_by_columns(weight: Tensor) -> bool:
    """Return whether the matrix is the transpose of a contiguous one. Its gradient then gets the same layout, so that
    gradients add up without a detour."""
    return not weight.is_contiguous() and weight.dim() == 2 and weight.t().is_contiguous()


class Ops(NamedTuple):
    """The ops that compute a block, each by the same kernel."""

    act: Callable[..., Any]
    act_backward: Callable[..., Any]
    gated: Callable[..., Any]
    dact: Callable[..., Any]
    dgated: Callable[..., Any]


def ops_by(kernel: str) -> Ops:
    """Return the ops by the kernel that ``Op.by`` takes. torch.compile knows them by their first names alone."""
    return _OPS if torch.compiler.is_compiling() else _faster_ops_by(kernel)


_OPS = Ops(_linear_act, _linear_act_backward, _linear_gated, _linear_dact, _linear_dgated)


@cache
def _faster_ops_by(kernel: str) -> Ops:
    return Ops(*(op.directly_by(kernel) for op in _OPS))  # type: ignore[attr-defined]


def begin(
    kind: Kind, ops: Ops, x: Tensor, save: bool,
    weight: Any, bias: Any, up_weight: Any = None, up_bias: Any = None, *_: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return h, the input of the last layer, and z if it is to be saved and the backward needs it. The Parameters come
    last."""
    h: Tensor
    z: Tensor
    if not kind.is_gated:
        h, z = ops.act(x, weight, bias, kind.activation, save)
        return h, z
    if kind.is_stacked:
        weight, up_weight = weight.chunk(2)
        bias, up_bias = (None, None) if bias is None else bias.chunk(2)
    h, z = ops.gated(x, weight, up_weight, bias, up_bias, kind.activation, save)
    return h, z
