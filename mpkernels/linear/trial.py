"""Makes calls for ``mpkernels.tune`` to time, and compares their results with fp64's."""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from mpkernels.linear import compute_block
from mpkernels.ops.linear.block_kind import Kind, Parameters
from mpkernels.selector.timing import Error

FLOPS_ON_CPU = 2**33  # more rows would take proportionally longer, and tell no more
SAMPLES = 64  # rows and hidden features that are compared, the first and the last among them
_NOISE, _DRAWS = 1e-9, 3  # the noise is too small to move a relu's input across 0


class Trial:
    """A call like the one at hand and its backward, on other data in the same layouts."""

    def __init__(
        self, rows: int, kind: Kind, x: Tensor, params: Parameters, trains: bool, autocast: torch.dtype | None
    ) -> None:
        self._kind, self._trains, self._autocast, self._device = kind, trains, autocast, x.device
        self.dtype = autocast or x.dtype
        inputs, hidden, outputs = params.sizes(kind)
        if self._device.type == "cpu":
            products = 2 * hidden * ((1 + kind.is_gated) * inputs + (outputs if params.out_weight is not None else 0))
            rows = min(rows, max(64, FLOPS_ON_CPU // products))
        self._generator = torch.Generator(self._device).manual_seed(0)
        self._x = self._like(x, (rows, inputs), 1.0)
        # Scaled so that results and gradients are near 1: neither overflows in 16 bits.
        scales = [1.0 if it is None or it.dim() == 1 else it.shape[1] ** -0.5 for it in params]
        made = zip(params, scales, strict=True)
        self._params = Parameters(*(None if it is None else self._like(it, tuple(it.shape), by) for it, by in made))
        self._dy = (self._normal((rows, outputs)) * rows**-0.5).to(self.dtype)
        self._rows, self._hidden = self._some_of(rows), self._some_of(hidden)

    def _normal(self, shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=self._generator, dtype=torch.float32, device=self._device)

    def _like(self, leaf: Tensor, shape: tuple[int, ...], scale: float) -> Tensor:
        made = (self._normal(shape[::-1] if is_transposed(leaf) else shape) * scale).to(leaf.dtype)
        return (made.t() if is_transposed(leaf) else made).requires_grad_(self._trains and leaf.requires_grad)

    def _some_of(self, count: int) -> Tensor:
        steps = torch.linspace(0, count - 1, min(count, SAMPLES), dtype=torch.float64, device=self._device)
        return steps.round().long()

    def run(self, name: str) -> list[Tensor]:
        """Return y and the gradients that are wanted."""
        # No cast is kept between calls: a step casts once.
        casting = torch.autocast(self._device.type, self._autocast, self._autocast is not None, cache_enabled=False)
        with casting, torch.set_grad_enabled(self._trains):
            y = compute_block.compute(name, self._kind, self._x, self._params, self._autocast)
        wanted = [it for it in (self._x, *self._params) if it is not None and it.requires_grad]
        return [y.detach(), *(torch.autograd.grad(y, wanted, self._dy) if wanted else ())]

    def errors(self, results: Sequence[Tensor]) -> list[Error]:
        """Compare some rows of y and of x's gradient, and some hidden features of the parameters' gradients. With a
        dropout there is nothing to compare, because each call drops other elements."""
        if self._kind.dropout:
            return [Error(0.0 if it.isfinite().all() else float("nan"), it.numel()) for it in results]
        named = zip(("y", "x", *Parameters._fields), (self._dy, self._x, *self._params), strict=True)
        names = [name for name, it in named if name == "y" or (it is not None and it.requires_grad)]
        exact = [self._exact[name] for name in names]
        parts = [self._part(name, it).double() for name, it in zip(names, results, strict=True)]
        shares = [(part - want).norm() / size for part, (want, size) in zip(parts, exact, strict=True)]
        return [Error(share, it.numel()) for share, it in zip(torch.stack(shares).tolist(), parts, strict=True)]

    def _part(self, name: str, tensor: Tensor) -> Tensor:
        """Return what belongs to the rows or the hidden features that are compared."""
        if name in ("y", "x"):
            return tensor[self._rows]
        if name in ("out_weight", "out_bias"):
            return tensor if name == "out_bias" else tensor[:, self._hidden]
        hidden = self._hidden
        return tensor[torch.cat((hidden, hidden + tensor.shape[0] // 2)) if self._kind.is_stacked else hidden]

    @cached_property
    def _exact(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return y and the gradients in fp64, each with the scale of its error: its norm or, if that is larger, the
        norm of its summands. Noise in the inputs measures the summands, because sums may cancel."""
        plain, *noisy = (self._in_fp64(noise) for noise in (0.0, *(_NOISE,) * _DRAWS))
        found = {}
        for name, value in plain.items():
            moved = torch.stack([(each[name] - value).norm() for each in noisy]).square().mean().sqrt() / _NOISE
            size = torch.maximum(value.norm(), moved)
            found[name] = value, torch.where(size > 0, size, 1)
        return found

    def _in_fp64(self, noise: float) -> dict[str, Tensor]:
        """Return y and x's gradient for the sampled rows, and the parameters' gradients for the sampled hidden
        features. A feature's gradients need only x, dy and that feature's parameters."""

        def given(tensor: Tensor) -> Tensor:
            wide = tensor.detach().to(self.dtype).double()
            return wide * (1 + noise * self._normal(tuple(wide.shape)))

        x, dy = given(self._x), given(self._dy)
        params = {name: given(it) for name, it in self._params._asdict().items() if it is not None}
        row_gradients = self._derived(x[self._rows], params, dy[self._rows])
        some = {name: self._part(name, it) for name, it in params.items()}
        hidden_gradients = self._derived(x, some, dy if "out_weight" in params else dy[:, self._hidden])
        return hidden_gradients | {name: row_gradients[name] for name in ("y", "x")}

    def _derived(self, x: Tensor, params: dict[str, Tensor], dy: Tensor) -> dict[str, Tensor]:
        leaves = {name: it.detach().requires_grad_() for name, it in {"x": x, **params}.items()}
        with torch.enable_grad():
            y = compute_block.by_torch(self._kind, leaves["x"], *(leaves.get(name) for name in Parameters._fields))
        return {"y": y.detach(), **dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), dy), strict=True))}


def is_transposed(tensor: Tensor) -> bool:
    """Return whether neighbours in the last dimension lie apart, as in ``weight.t()`` of a contiguous weight."""
    return tensor.dim() > 0 and tensor.stride(-1) != 1 and tensor.shape[-1] > 1
