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
        bend = torch.zeros_like(y)
        if slope.requires_grad:
            [bend] = torch.autograd.grad(slope, at, torch.ones_like(y))
    y, slope = y.detach(), slope.detach()
    of_slope = torch.maximum(slope.square(), bend.square() * z.squares).clamp(min=1)
    return Exact(y, slope.square() * z.squares), Exact(slope, of_slope)


def block(kind: Kind, x: Tensor, own: Parameters, dy: Tensor) -> ExactBlock:
    """Compute a block without a dropout, and its backward, from tensors in fp64."""
    inputs, into = given(x), given(dy)
    z = linear(inputs, own.weight, own.bias)
    gate, up = z, None
    if kind.is_stacked:
        gate, up = (Exact(*each) for each in zip(*(it.chunk(2, 1) for it in z), strict=True))
    elif kind.is_gated:
        up = linear(inputs, own.up_weight, own.up_bias)
    active, slope = activated(kind.activation, gate)
    h = active if up is None else times(active, up)
    has_out = own.out_weight is not None
    y = linear(h, own.out_weight, own.out_bias) if has_out else h
    dh = product(into, given(own.out_weight)) if has_out else into
    dz, dup = times(dh if up is None else times(dh, up), slope), None if up is None else times(dh, active)
    if kind.is_stacked and dup is not None:
        dz, dup = Exact(*(torch.cat(each, 1) for each in zip(dz, dup, strict=True))), None
    dx = product(dz, given(own.weight))
    if dup is not None:
        dx = plus(dx, product(dup, given(own.up_weight)))
    pairs = (dz, inputs), (dup, inputs), (into if has_out else None, h)
    found = [it for slope, of in pairs for it in ((None, None) if slope is None else _of_layer(slope, of))]
    return ExactBlock(
        y, dx, Parameters(*(it if mine is not None else None for it, mine in zip(found, own, strict=True)))
    )


def _of_layer(dz: Exact, x: Exact) -> tuple[Exact, Exact]:
    """Return the gradients of a weight and of a bias."""
    return product(dz.t(), x), summed(dz)


def _largest(it: Exact) -> Tensor:
    return torch.maximum(it.value.square(), it.squares)


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
    lucky; so does fp32 of several layers. Many numbers of one layer don't. independent: how many numbers of the first
    result are rounded without regard to each other.
    """
    for name, mine, rival, want, size in zip(names, ours, theirs, wanted, sizes, strict=True):
        assert (mine.shape, mine.dtype) == (rival.shape, rival.dtype), name
        eps, numbers = torch.finfo(mine.dtype).eps, min(mine.numel(), independent)
        is_wide = mine.dtype == torch.float32
        is_exposed = numbers < 64 or (is_wide and not is_one_layer)
        norm = size.norm() if is_exposed else want.norm()
        off, rivals = (((it.cpu() - want).norm() / norm).item() for it in (mine, rival))
        luck = 2 * (eps + rivals) / max(1, numbers) ** 0.5 if is_exposed else 0.0
        bound = 1.02 * rivals + (2 * eps if is_wide else eps / 8 + luck)
        assert off <= bound, f"{name}: {off:.3g} > {bound:.3g}"
