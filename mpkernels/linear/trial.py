"""A linear_act for the selector to time, and to compare with what is exact."""

from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from mpkernels.linear import exact, paths
from mpkernels.linear.exact import Exact, given
from mpkernels.selector.trial import Error

FLOPS_ON_CPU = 2**30  # where more rows take proportionally longer
SAMPLES = 64  # rows and features that are compared, the first and the last among them
_BLOCK = 1024  # rows or features that are in fp64 at a time


class LinearTrial:
    """A call like the one at hand and its backward, on other data in the same layouts."""

    def __init__(
        self,
        rows: int,
        leaves: Sequence[Tensor],
        activation: str,
        trains: bool,
        autocast: torch.dtype | None,
    ) -> None:
        """leaves: the call's x, weight and, if there is one, bias."""
        self._activation, self._trains, self._autocast = activation, trains, autocast
        self._device, (outputs, features) = leaves[0].device, leaves[1].shape
        self.dtype = autocast or leaves[0].dtype
        if self._device.type == "cpu":
            rows = min(rows, max(64, FLOPS_ON_CPU // (2 * outputs * features)))
        self._generator = torch.Generator(self._device).manual_seed(0)
        shapes = (rows, features), (outputs, features), (outputs,)
        scales = 1.0, features**-0.5, 1.0  # neither outputs nor gradients overflow
        made = [self._like(*each) for each in zip(leaves, shapes, scales, strict=False)]
        self._leaves = [each.requires_grad_(trains) for each in made]
        self._dy = self._normal((rows, outputs), rows**-0.5).to(self.dtype)
        self._rows, self._features = self._some_of(rows), self._some_of(outputs)

    def _normal(self, shape: tuple[int, ...], scale: float) -> Tensor:
        return torch.randn(shape, generator=self._generator, device=self._device) * scale

    def _like(self, leaf: Tensor, shape: tuple[int, ...], scale: float) -> Tensor:
        if not is_transposed(leaf):
            return self._normal(shape, scale).to(leaf.dtype)
        return self._normal(shape[::-1], scale).to(leaf.dtype).t()

    def _some_of(self, count: int) -> Tensor:
        steps = torch.linspace(0, count - 1, min(count, SAMPLES), dtype=torch.float64, device=self._device)
        return steps.round().long()

    def run(self, name: str) -> list[Tensor]:
        """Return y and the gradients of x, weight and bias."""
        x, weight, *bias = self._leaves
        # A cast for each call, as there is one for each step.
        casting = torch.autocast(self._device.type, self._autocast, self._autocast is not None, cache_enabled=False)
        with casting, torch.set_grad_enabled(self._trains):
            y = paths.compute(name, x, weight, bias[0] if bias else None, self._activation, self._autocast)
        return [y.detach(), *(torch.autograd.grad(y, self._leaves, self._dy) if self._trains else ())]

    def errors(self, results: Sequence[Tensor]) -> list[Error]:
        y, *gradients = results
        places = self._rows, self._features, self._features
        parts = [y[self._rows], y[:, self._features], *(it[at] for it, at in zip(gradients, places, strict=False))]
        return exact.errors(parts, self._exact)

    @cached_property
    def _exact(self) -> list[Exact]:
        """Return the rows of y, its features, the rows of x's gradient, the features of weight's and bias's."""
        x, weight, *bias = (leaf.detach().to(self.dtype) for leaf in self._leaves)
        rows, features = self._rows, self._features
        by_features = [
            self._in_fp64(x[rows], weight[at], [it[at] for it in bias], self._dy[rows][:, at])
            for at in torch.arange(len(weight), device=self._device).split(_BLOCK)
        ]
        by_rows = [
            self._in_fp64(x[at], weight[features], [it[features] for it in bias], self._dy[at][:, features])
            for at in torch.arange(len(x), device=self._device).split(_BLOCK)
        ]
        joined = [_joined(torch.cat, by_features, 0, 1), _joined(torch.cat, by_rows, 0, 0)]
        if self._trains:
            joined.append(_joined(_added, by_features, 1))
            joined += [_joined(_added, by_rows, i) for i in range(2, 3 + len(bias))]
        return joined

    def _in_fp64(self, x: Tensor, weight: Tensor, bias: list[Tensor], dy: Tensor) -> list[Exact]:
        """Return y and the gradients of x, weight and bias."""
        x, weight, dy, *bias = (it.double() for it in (x, weight, dy, *bias))
        y, slope = exact.activated(self._activation, exact.linear(given(x), weight, bias[0] if bias else None))
        dz = exact.times(given(dy), slope)
        return [y, exact.product(dz, given(weight)), exact.product(dz.t(), given(x)), exact.summed(dz)]


def _joined(join: Callable[..., Tensor], blocks: list[list[Exact]], i: int, *dim: int) -> Exact:
    """Join the i-th result of each block."""
    return Exact(*(join(parts, *dim) for parts in zip(*(block[i] for block in blocks), strict=True)))


def _added(parts: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(parts)).sum(0)


def is_transposed(tensor: Tensor) -> bool:
    """Return whether neighbours in the last dimension lie apart, as in ``weight.t()`` of a contiguous weight."""
    return tensor.dim() > 0 and tensor.stride(-1) != 1 and tensor.shape[-1] > 1
