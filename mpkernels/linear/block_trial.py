"""A block for the selector to time, and to compare with what is exact."""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from mpkernels.linear import block, exact
from mpkernels.linear.block_kind import Kind, Parameters
from mpkernels.linear.exact import Exact
from mpkernels.linear.trial import SAMPLES, is_transposed
from mpkernels.selector.trial import Error

FLOPS_ON_CPU = 2**33  # with fewer rows than these make, the weights' casts and gradients take more of the time


class BlockTrial:
    """A call like the one at hand and its backward, on other data in the same layouts."""

    def __init__(
        self, rows: int, kind: Kind, x: Tensor, own: Parameters, trains: bool, autocast: torch.dtype | None
    ) -> None:
        self._kind, self._trains, self._autocast, self._device = kind, trains, autocast, x.device
        self.dtype = autocast or x.dtype
        inputs, hidden, outputs = own.sizes(kind)
        if self._device.type == "cpu":
            products = 2 * hidden * ((1 + kind.is_gated) * inputs + (outputs if own.out_weight is not None else 0))
            rows = min(rows, max(64, FLOPS_ON_CPU // products))
        self._generator = torch.Generator(self._device).manual_seed(0)
        self._x = self._like(x, (rows, inputs))
        self._own = Parameters(*(None if it is None else self._like(it, tuple(it.shape)) for it in own))
        self._dy = self._normal((rows, outputs), rows**-0.5).to(self.dtype)
        self._rows, self._hidden = self._some_of(rows), self._some_of(hidden)

    def _normal(self, shape: tuple[int, ...], scale: float) -> Tensor:
        return torch.randn(shape, generator=self._generator, device=self._device) * scale

    def _like(self, leaf: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Make one of a size that lets neither results nor gradients overflow."""
        scale = 1.0 if len(shape) == 1 or leaf.dim() > 2 else shape[1] ** -0.5
        made = self._normal(shape[::-1] if is_transposed(leaf) else shape, scale).to(leaf.dtype)
        made = made.t() if is_transposed(leaf) else made
        return made.requires_grad_(self._trains and leaf.requires_grad)

    def _some_of(self, count: int) -> Tensor:
        steps = torch.linspace(0, count - 1, min(count, SAMPLES), dtype=torch.float64, device=self._device)
        return steps.round().long()

    def run(self, name: str) -> list[Tensor]:
        """Return y and the gradients that are wanted."""
        # A cast for each call, as there is one for each step.
        casting = torch.autocast(self._device.type, self._autocast, self._autocast is not None, cache_enabled=False)
        with casting, torch.set_grad_enabled(self._trains):
            y = block.compute(name, self._kind, self._x, self._own, self._autocast)
        wanted = self._wanted(self._x, self._own)
        return [y.detach(), *(torch.autograd.grad(y, wanted, self._dy) if wanted else ())]

    @staticmethod
    def _wanted(x: Tensor, own: Parameters) -> list[Tensor]:
        return [it for it in (x, *own) if it is not None and it.requires_grad]

    def errors(self, results: Sequence[Tensor]) -> list[Error]:
        """Compare some rows of y and of x's gradient, and what some hidden features have of the parameters'. With a
        dropout there is nothing to compare: each call drops others."""
        if self._kind.dropout:
            return [Error(0.0 if it.isfinite().all() else float("nan"), it.numel()) for it in results]
        y, *gradients = results
        parts = [y[self._rows]]
        names = [name for name, it in zip(("x", *Parameters._fields), (self._x, *self._own), strict=True)
                 if it is not None and it.requires_grad]  # fmt: skip
        parts += [self._part(name, it) for name, it in zip(names, gradients, strict=True)]
        return exact.errors(parts, self._exact)

    def _part(self, name: str, it: Tensor) -> Tensor:
        """Return what belongs to the rows or the hidden features that are compared."""
        if name == "x":
            return it[self._rows]
        if name == "out_bias":
            return it
        if name == "out_weight":
            return it[:, self._hidden]
        if not self._kind.is_stacked:
            return it[self._hidden]
        return it[torch.cat((self._hidden, self._hidden + it.shape[0] // 2))]

    @cached_property
    def _exact(self) -> list[Exact]:
        """Return the rows of y and of x's gradient, and the parameters' gradients. Those of a hidden feature are made
        of x, of dy and of what belongs to the feature itself."""
        x, dy = self._x.detach().to(self.dtype).double(), self._dy.double()
        own = {name: it.detach().to(self.dtype).double() for name, it in self._own._asdict().items() if it is not None}
        some = {name: self._part(name, it) for name, it in own.items()}
        of_rows = exact.block(self._kind, x[self._rows], _parameters(own), dy[self._rows])
        of_hidden = exact.block(
            self._kind, x, _parameters(some), dy if self._own.out_weight is not None else dy[:, self._hidden]
        )
        gradients = of_rows.dx, *of_hidden.gradients
        wanted = [it is not None and it.requires_grad for it in (self._x, *self._own)]
        return [of_rows.y, *(it for it, want in zip(gradients, wanted, strict=True) if want)]


def _parameters(tensors: dict[str, Tensor]) -> Parameters:
    return Parameters(*(tensors.get(name) for name in Parameters._fields))
