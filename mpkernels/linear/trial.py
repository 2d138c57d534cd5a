"""Makes calls for ``mpkernels.tune`` to time."""

import torch
from torch import Tensor

from mpkernels.linear import compute_block
from mpkernels.ops.linear.block_kind import Kind, Parameters

FLOPS_ON_CPU = 2**33  # more rows would take proportionally longer, and tell no more


class Trial:
    """A call like the one at hand and its backward, on other data in the same layouts."""

    def __init__(
        self, rows: int, kind: Kind, x: Tensor, params: Parameters, trains: bool, autocast: torch.dtype | None
    ) -> None:
        self._kind, self._trains, self._autocast, self._device = kind, trains, autocast, x.device
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
        self._dy = (self._normal((rows, outputs)) * rows**-0.5).to(autocast or x.dtype)

    def _normal(self, shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=self._generator, dtype=torch.float32, device=self._device)

    def _like(self, leaf: Tensor, shape: tuple[int, ...], scale: float) -> Tensor:
        made = (self._normal(shape[::-1] if is_transposed(leaf) else shape) * scale).to(leaf.dtype)
        return (made.t() if is_transposed(leaf) else made).requires_grad_(self._trains and leaf.requires_grad)

    def run(self, name: str) -> list[Tensor]:
        """Return y and the gradients that are wanted."""
        # No cast is kept between calls: a step casts once.
        casting = torch.autocast(self._device.type, self._autocast, self._autocast is not None, cache_enabled=False)
        with casting, torch.set_grad_enabled(self._trains):
            y = compute_block.compute(name, self._kind, self._x, self._params, self._autocast)
        wanted = [it for it in (self._x, *self._params) if it is not None and it.requires_grad]
        return [y.detach(), *(torch.autograd.grad(y, wanted, self._dy) if wanted else ())]


def is_transposed(tensor: Tensor) -> bool:
    """Return whether neighbours in the last dimension lie apart, as in ``weight.t()`` of a contiguous weight."""
    return tensor.dim() > 0 and tensor.stride(-1) != 1 and tensor.shape[-1] > 1
