"""One model, trained in four ways that differ in the dtype of its weights and in who steps them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR

from mpkernels import amp, nn, optim
from mpkernels.bench import steps
from mpkernels.bench.pairs import Samples, measure
from mpkernels.bench.settings import Place, Setting, Sizes
from mpkernels.demo.model import Size, Transformer

MAX_NORM, BETAS = 1.0, (0.9, 0.95)
WARM_UP = 20  # steps
GROWTH_INTERVAL = 40  # steps, so that a short training sees the loss scale grow
OVERFLOWING, PLACE = "layers.0.up.weight", (5, 7)  # where a grad gets an inf


class Way(NamedTuple):
    name: str
    weights: torch.dtype
    moments: torch.dtype | None = None  # None is torch's optimizer, whose moments have the dtype of the weights

    @property
    def has_scaler(self) -> bool:
        """Return whether a loss scale guards the training. torch's scaler refuses bf16 grads on CUDA."""
        return self.moments is not None or self.weights == torch.float32


FP32 = Way("torch.amp, fp32 weights", torch.float32)
BF16 = Way("torch, bf16 weights", torch.bfloat16)
OURS = Way("mpkernels, bf16 moments", torch.bfloat16, torch.bfloat16)
OURS_8_BIT = Way("mpkernels, 8-bit moments", torch.bfloat16, torch.int8)
WAYS = (FP32, BF16, OURS, OURS_8_BIT)


class Training:
    def __init__(self, way: Way, size: Size, device: torch.device, steps: int) -> None:
        self.way, self.device = way, device
        self.held_out: list[tuple[int, float]] = []  # (step, loss)
        self.scales: list[float] = []  # after each step
        torch.manual_seed(0)
        self.model = Transformer(size).to(device, way.weights)
        if way.moments is None:
            self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), size.lr, BETAS, fused=True)
            scaler: Any = torch.amp.GradScaler
        else:
            nn.fuse(self.model)
            ours, scaler = optim.AdamW, amp.GradScaler
            self.optimizer = ours(self.model.parameters(), size.lr, BETAS, max_norm=MAX_NORM, state_dtype=way.moments)
        self.scaler = scaler(device.type, growth_interval=GROWTH_INTERVAL, enabled=way.has_scaler)
        # The learning rate rises for some steps, and falls in all.
        self.schedule = LambdaLR(self.optimizer, lambda step: min((step + 1) / WARM_UP, 1 - 0.98 * step / steps))

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16):
            logits = self.model(inputs)
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def step(self, inputs: Tensor, targets: Tensor, overflows: bool = False) -> None:
        """Train on a batch. With ``overflows``, an inf in a grad costs each way this step: a loss scale skips it, and a
        way without one leaves it out."""
        self.optimizer.zero_grad()
        self.scaler.scale(self.loss(inputs, targets)).backward()
        if overflows:
            self.model.get_parameter(OVERFLOWING).grad[PLACE] = torch.inf  # type: ignore[index]
        if self.way.has_scaler or not overflows:
            self.update()
        self.schedule.step()
        self.scales.append(self.scaler.get_scale())

    def update(self) -> None:
        """Unscale and clip the grads, then step. Our optimizer does all three by itself."""
        if self.way.moments is None:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    @torch.no_grad()
    def evaluate(self, step: int, batches: Sequence[tuple[Tensor, Tensor]]) -> None:
        losses = torch.stack([self.loss(inputs, targets) for inputs, targets in batches])
        self.held_out.append((step, float(losses.mean())))

    def bytes_per_parameter(self) -> dict[str, float]:
        """Return what the tensors take that are kept from one step to the next."""
        parameters = list(self.model.parameters())
        states = [it for state in self.optimizer.state.values() for it in state.values() if isinstance(it, Tensor)]
        grads = [it.grad for it in parameters if it.grad is not None]
        kinds: dict[str, list[Tensor]] = {"weight": [*parameters], "grad": grads, "state": states}
        count = sum(it.numel() for it in parameters)
        return {kind: sum(it.nbytes for it in tensors) / count for kind, tensors in kinds.items()}


def time_steps(shapes: Sequence[tuple[int, ...]], way: Way, device: torch.device, seconds: float) -> Samples:
    """Time steps of such parameters with unscaling and clipping, by ours of this way and by torch's fused optimizer,
    in turns."""
    setting = Setting(Place(device.type, torch.get_num_threads()), "bf16", Sizes("demo", tuple(shapes)))
    pair = steps.compare_steps(setting, steps.fused, "loop", state_dtype=way.moments)
    return measure(pair, device.type, seconds, builds=1)
