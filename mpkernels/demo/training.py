"""Trains one model in four ways, which differ in the dtype of the weights and in the optimizer. The model is a
transformer over bytes in plain torch; its text is Python's standard library, which every machine has."""

import sysconfig
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Embedding, LayerNorm, Linear, Module, ModuleList, Transformer, TransformerEncoderLayer, init
from torch.nn.functional import cross_entropy, pad
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR

from mpkernels import amp, memory_report, nn, optim

MAX_NORM, BETAS = 1.0, (0.9, 0.95)
WARM_UP = 20  # steps in which the learning rate rises
OVERFLOWING, PLACE = "layers.0.linear1.weight", (5, 7)  # the parameter and the place whose grad is set to inf


class Size(NamedTuple):
    width: int = 192
    layers: int = 2
    heads: int = 4
    context: int = 64
    batch: int = 8
    lr: float = 2e-3
    steps: int = 50


SIZES = {"cpu": Size(), "cuda": Size(width=768, layers=8, heads=12, context=256, batch=32, lr=6e-4, steps=500)}


class Way(NamedTuple):
    name: str
    weights: torch.dtype
    moments: torch.dtype | None = None  # None means torch's optimizer, whose moments have the weights' dtype


FP32 = Way("torch.amp, fp32 weights", torch.float32)
BF16 = Way("torch, bf16 weights", torch.bfloat16)
OURS = Way("mpkernels, bf16 moments", torch.bfloat16, torch.bfloat16)
OURS_8_BIT = Way("mpkernels, 8-bit moments", torch.bfloat16, torch.int8)
WAYS = (FP32, BF16, OURS, OURS_8_BIT)


class Predictor(Module):
    """Predicts the next byte from embeddings of single bytes and of pairs of bytes. Most of its parameters are
    embeddings, as in small language models."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.bytes, self.pairs, self.places = (Embedding(it, size.width) for it in (256, 256 * 256, size.context))
        for embedding in (self.bytes, self.pairs, self.places):
            init.normal_(embedding.weight, std=0.02)
        shape = size.width, size.heads, 4 * size.width
        self.layers = ModuleList(
            TransformerEncoderLayer(*shape, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
            for _ in range(size.layers)
        )
        self.norm, self.head = LayerNorm(size.width), Linear(size.width, 256)

    def forward(self, inputs: Tensor) -> Tensor:
        context, before = inputs.shape[1], pad(inputs[:, :-1], (1, 0))
        x = self.bytes(inputs) + self.pairs(256 * before + inputs) + self.places.weight[:context]
        mask = Transformer.generate_square_subsequent_mask(context, x.device, x.dtype)
        for layer in self.layers:
            x = layer(x, mask, is_causal=True)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def sources(device: torch.device) -> Tensor:
    """Return the bytes of the modules of Python's standard library."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray().join(path.read_bytes() for path in paths), dtype=torch.uint8).to(device)


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
            params = self.model.parameters()
            self.optimizer = optim.AdamW(params, self.size.lr, BETAS, max_norm=MAX_NORM, state_dtype=way.moments)
        scaler: Any = torch.amp.GradScaler if way == FP32 else amp.GradScaler  # torch's refuses bf16 grads on CUDA
        self.scaler = scaler(self.device)
        # The learning rate rises for some steps, and falls in all.
        self.schedule = LambdaLR(self.optimizer, lambda step: min((step + 1) / WARM_UP, 1 - 0.98 * step / steps))

    def loss(self, text: Tensor, seed: int) -> Tensor:
        """Return the loss of a batch, which is the same for each seed."""
        draws, length = torch.Generator().manual_seed(seed), self.size.context + 1
        starts = torch.randint(len(text) - length, (self.size.batch, 1), generator=draws)
        window = text[(starts + torch.arange(length)).to(text.device)].long()
        with torch.autocast(self.device, torch.bfloat16):
            logits = self.model(window[:, :-1])
        return cross_entropy(logits.flatten(0, 1).float(), window[:, 1:].flatten())

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
        held: dict[str, Any] = memory_report(self.model, self.optimizer).measured
        count = sum(param.numel() for param in self.model.parameters())
        sizes = held["parameters"], held["gradients"], held["masters"] + held["moments"]
        return {kind: size / count for kind, size in zip(("weight", "grad", "state"), sizes, strict=True)}
