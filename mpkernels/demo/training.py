"""Trains one model in four ways, which differ in the dtype of the weights and in the optimizer."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR

from mpkernels import amp, nn, optim
from mpkernels.demo.model import SIZES, Predictor, batch

MAX_NORM, BETAS = 1.0, (0.9, 0.95)
WARM_UP = 20  # steps in which the learning rate rises
GROWTH_INTERVAL = 40  # steps, so few that the loss scale grows in a short training
OVERFLOWING, PLACE = "layers.0.linear1.weight", (5, 7)  # the parameter and the place whose grad is set to inf


class Way(NamedTuple):
    name: str
    weights: torch.dtype
    moments: torch.dtype | None = None  # None means torch's optimizer, whose moments have the weights' dtype


FP32 = Way("torch.amp, fp32 weights", torch.float32)
BF16 = Way("torch, bf16 weights", torch.bfloat16)
OURS = Way("mpkernels, bf16 moments", torch.bfloat16, torch.bfloat16)
OURS_8_BIT = Way("mpkernels, 8-bit moments", torch.bfloat16, torch.int8)
WAYS = (FP32, BF16, OURS, OURS_8_BIT)


class Training:
    def __init__(self, way: Way, text: Tensor, steps: int) -> None:
        self.way, self.device, self.size = way, text.device.type, SIZES[text.device.type]
        self.held_out, self.text = text.tensor_split([len(text) // 20])
        self.losses: dict[int, float] = {}  # step -> loss on the held-out text
        self.scales: list[float] = []  # after each step
        torch.manual_seed(0)
        self.model = Predictor(self.size).to(self.device, way.weights)
        if way.moments is None:
            self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), self.size.lr, BETAS, fused=True)
        else:
            nn.fuse(self.model)
            options: dict[str, Any] = {"max_norm": MAX_NORM, "state_dtype": way.moments}
            self.optimizer = optim.AdamW(self.model.parameters(), self.size.lr, BETAS, **options)
        scaler: Any = torch.amp.GradScaler if way == FP32 else amp.GradScaler  # torch's refuses bf16 grads on CUDA
        self.scaler = scaler(self.device, growth_interval=GROWTH_INTERVAL)
        # The learning rate rises for some steps, and falls in all.
        self.schedule = LambdaLR(self.optimizer, lambda step: min((step + 1) / WARM_UP, 1 - 0.98 * step / steps))

    def loss(self, text: Tensor, seed: int) -> Tensor:
        inputs, targets = batch(text, self.size, seed)
        with torch.autocast(self.device, torch.bfloat16):
            logits = self.model(inputs)
        return cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def step(self, step: int, overflows: bool = False) -> None:
        """Train on a batch. With ``overflows``, set a grad to inf, so that the scaler skips the step."""
        self.optimizer.zero_grad()
        self.scaler.scale(self.loss(self.text, step)).backward()
        if overflows:
            self.model.get_parameter(OVERFLOWING).grad[PLACE] = torch.inf  # type: ignore[index]
        if self.way.moments is None:  # our optimizer unscales and clips in its step
            self.scaler.unscale_(self.optimizer)
            clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.step()
        self.scales.append(self.scaler.get_scale())

    @torch.no_grad()
    def evaluate(self, after: int) -> None:
        self.losses[after] = sum(self.loss(self.held_out, seed).item() for seed in range(8)) / 8

    def bytes_per_parameter(self) -> dict[str, float]:
        """Return the bytes of the tensors that live from one step to the next."""
        params: list[Tensor] = [*self.model.parameters()]
        grads = [it.grad for it in params if it.grad is not None]
        states = [it for state in self.optimizer.state.values() for it in state.values() if isinstance(it, Tensor)]
        kinds = {"weight": params, "grad": grads, "state": states}
        count = sum(it.numel() for it in params)
        return {kind: sum(it.nbytes for it in tensors) / count for kind, tensors in kinds.items()}
