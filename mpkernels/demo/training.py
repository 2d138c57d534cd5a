"""One training loop, and the names that one import or the other binds in it: they are all in which the two differ."""

from collections.abc import Sequence
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mpkernels import amp, nn, optim
from mpkernels.demo.memory import Meter
from mpkernels.demo.model import LinearThenAct, Size, Transformer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SIDES = ("torch.amp", "mpkernels")
NAMES = {
    "LinearAct":       (LinearThenAct,                  nn.LinearAct),
    "autocast":        (torch.amp.autocast,             amp.autocast),
    "GradScaler":      (torch.amp.GradScaler,           amp.GradScaler),
    "clip_grad_norm_": (torch.nn.utils.clip_grad_norm_, amp.clip_grad_norm_),
    "AdamW":           (torch.optim.AdamW,              optim.AdamW),
}  # fmt: skip


class Training:
    """Of one side. What it has come to is in its lists: a loss for each step, seconds for each slice of steps."""

    def __init__(self, side: str, size: Size, precision: str, device: torch.device, seed: int) -> None:
        self.side, self.device, self.tokens = side, device, size.batch * size.context
        self.names: Any = SimpleNamespace(**{name: both[SIDES.index(side)] for name, both in NAMES.items()})
        self.losses: list[float] = []
        self.seconds: list[tuple[int, float]] = []  # (steps, seconds)
        self.meter = Meter(device)
        torch.manual_seed(seed)
        self.model = Transformer(size, self.names.LinearAct).to(device)
        self.optimizer = self.names.AdamW(self.model.parameters(), lr=size.lr, fused=True)
        self.scaler = self.names.GradScaler(device.type, enabled=precision == "fp16")
        self.dtype = DTYPES[precision]

    def autocast(self) -> Any:
        is_mixed = self.dtype != torch.float32
        return self.names.autocast(self.device.type, self.dtype if is_mixed else None, enabled=is_mixed)

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        with self.autocast():
            loss = functional.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        self.names.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()

    def train(self, batches: Sequence[tuple[Tensor, Tensor]]) -> None:
        """A slice of steps. Nothing is read from the device before its end."""
        with self.meter.watch(self.model, self.optimizer):
            start = perf_counter()
            losses = [self.step(inputs, targets) for inputs, targets in batches]
            self.losses += torch.stack(losses).tolist()
            self.seconds.append((len(batches), perf_counter() - start))

    @torch.no_grad()
    def evaluate(self, batches: Sequence[tuple[Tensor, Tensor]]) -> float:
        with self.autocast():
            losses = [
                functional.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())
                for inputs, targets in batches
            ]
        return float(torch.stack(losses).mean())

    @property
    def skipped_steps(self) -> int:
        """An optimizer counts the steps that it has taken; an overflow costs it one."""
        taken = [int(state["step"]) for state in self.optimizer.state.values() if "step" in state]
        return len(self.losses) - max(taken, default=0)

    def state_dict(self) -> dict[str, Any]:
        parts = {name: getattr(self, name).state_dict() for name in ("model", "optimizer", "scaler")}
        return parts | {"losses": self.losses, "seconds": self.seconds, "peak": self.meter.peak}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in ("model", "optimizer", "scaler"):
            getattr(self, name).load_state_dict(state[name])
        self.losses, self.meter.peak = list(state["losses"]), int(state["peak"])
        self.seconds = [(int(steps), float(seconds)) for steps, seconds in state["seconds"]]
