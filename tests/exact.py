"""Layers and blocks in fp64, and the errors to expect of the same numbers in fewer bits."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mpkernels.ops.linear.activations import ACTIVATIONS
from mpkernels.ops.linear.block_kind import Kind, Parameters


class Exact(NamedTuple):
    """Exact numbers, and the squares of the sizes to which their errors are proportional. A sum's error is proportional
    to the size of its terms, however little is left of the sum."""

    value: Tensor
    squares: Tensor

    def t(self) -> "Exact":
        return Exact(self.value.t(), self.squares.t())

    def norm(self) -> Tensor:
        """Return the norm of the tensors together, or 1 if it is 0."""
        norm = (self.value.square() + self.squares).sum().sqrt()
        return torch.where(norm > 0, norm, 1)


class ExactBlock(NamedTuple):
    y: Exact
    dx: Exact
    gradients: Parameters  # one for each parameter that exists


def given(value: Tensor) -> Exact:
    """Return an input, which has no error."""
    return Exact(value, torch.zeros_like(value))


def plus(a: Exact, b: Exact) -> Exact:
    return Exact(a.value + b.value, a.squares + b.squares)


def times(a: Exact, b: Exact) -> Exact:
    return Exact(a.value * b.value, a.value.square() * b.squares + a.squares * b.value.square())


def product(a: Exact, b: Exact) -> Exact:
    """Return ``a @ b``."""
    return Exact(a.value @ b.value, _largest(a) @ _largest(b))


def summed(a: Exact) -> Exact:
    """Return the sum over rows."""
    return Exact(a.value.sum(0), _largest(a).sum(0))


def linear(x: Exact, weight: Tensor, bias: Tensor | None) -> Exact:
    z = product(x, given(weight.t()))
    return z if bias is None else plus(z, Exact(bias, bias.square()))


def activated(activation: str, z: Exact) -> tuple[Exact, Exact]:
    """Return the activation of z and its slope. Their errors come from z; the slope's error is at least proportional to
    1, because kernels may compute the slope from a rounded y."""
    at = z.value.detach().requires_grad_()
    with torch.enable_grad():
        y = ACTIVATIONS[activation].forward(at)  # torch's gelu is 0 from z = -8.3 on, in fp64 too
        [slope] = torch.autograd.grad(y, at, torch.ones_like(y), create_graph=True)
        curvature = torch.zeros_like(y)
        if slope.requires_grad:
            [curvature] = torch.autograd.grad(slope, at, torch.ones_like(y))
    y, slope = y.detach(), slope.detach()
    slope_squares = torch.maximum(slope.square(), curvature.square() * z.squares).clamp(min=1)
    return Exact(y, slope.square() * z.squares), Exact(slope, slope_squares)


def block(kind: Kind, x: Tensor, parameters: Parameters, dy: Tensor) -> ExactBlock:
    """Compute a block without a dropout, and its backward, from tensors in fp64."""
    inputs, exact_dy = given(x), given(dy)
    z = linear(inputs, parameters.weight, parameters.bias)
    gate, up = z, None
    if kind.is_stacked:
        gate, up = (Exact(*half) for half in zip(*(it.chunk(2, 1) for it in z), strict=True))
    elif kind.is_gated:
        up = linear(inputs, parameters.up_weight, parameters.up_bias)
    active, slope = activated(kind.activation, gate)
    h = active if up is None else times(active, up)
    has_out = parameters.out_weight is not None
    y = linear(h, parameters.out_weight, parameters.out_bias) if has_out else h
    dh = product(exact_dy, given(parameters.out_weight)) if has_out else exact_dy
    dz, dup = times(dh if up is None else times(dh, up), slope), None if up is None else times(dh, active)
    if kind.is_stacked and dup is not None:
        dz, dup = Exact(*(torch.cat(halves, 1) for halves in zip(dz, dup, strict=True))), None
    dx = product(dz, given(parameters.weight))
    if dup is not None:
        dx = plus(dx, product(dup, given(parameters.up_weight)))
    layers = (dz, inputs), (dup, inputs), (exact_dy if has_out else None, h)
    found = [it for dout, x in layers for it in ((None, None) if dout is None else _layer_gradients(dout, x))]
    pairs = zip(found, parameters, strict=True)
    return ExactBlock(y, dx, Parameters(*(it if parameter is not None else None for it, parameter in pairs)))


def _layer_gradients(dz: Exact, x: Exact) -> tuple[Exact, Exact]:
    """Return the gradients of a weight and of a bias."""
    return product(dz.t(), x), summed(dz)


def _largest(a: Exact) -> Tensor:
    """Return the squares of the numbers, or of the sizes of their errors where these are larger."""
    return torch.maximum(a.value.square(), a.squares)


def assert_as_near(
    names: Sequence[str],
    ours: Sequence[Tensor],
    theirs: Sequence[Tensor],
    wanted: Sequence[Tensor],
    sizes: Sequence[Exact],
    independent: int,
    is_one_layer: bool,
) -> None:
    """Assert SEMANTICS' error contract: our error against fp64 exceeds torch's by at most 2 %, plus a floor.

    Few numbers get a floor in proportion to the summands' size, because sums may cancel and torch's rounding may be
    lucky; so does fp32 of several layers. Many numbers of one layer don't. ``independent`` is how many numbers of the
    first result are rounded independently.
    """
    for name, mine, rival, want, size in zip(names, ours, theirs, wanted, sizes, strict=True):
        assert (mine.shape, mine.dtype) == (rival.shape, rival.dtype), name
        eps, numbers = torch.finfo(mine.dtype).eps, min(mine.numel(), independent)
        is_wide = mine.dtype == torch.float32
        is_exposed = numbers < 64 or (is_wide and not is_one_layer)
        norm = size.norm() if is_exposed else want.norm()
        error, rival_error = (((it.cpu() - want).norm() / norm).item() for it in (mine, rival))
        luck = 2 * (eps + rival_error) / max(1, numbers) ** 0.5 if is_exposed else 0.0
        bound = 1.02 * rival_error + (2 * eps if is_wide else eps / 8 + luck)
        assert error <= bound, f"{name}: {error:.3g} > {bound:.3g}"
