"""The columns of the matrix: our drop-ins that are tried with each tool."""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from mpkernels.amp import GradScaler
from mpkernels.nn import LinearAct
from mpkernels.optim import SGD, Adam, AdamW, Lion
from mpkernels.optim.engine import Engine

F32, B16, F16 = torch.float32, torch.bfloat16, torch.float16
LR = 1e-2
_WORDS = {F32: "fp32", B16: "bf16", F16: "fp16", torch.int8: "int8"}
_SCALERS = {"our": GradScaler, "torch's": torch.amp.GradScaler}


@dataclass(frozen=True)
class DropIn:
    """A way to train with mpkernels."""

    name: str
    kind: type[torch.optim.Optimizer]
    options: dict[str, Any]
    dtype: torch.dtype = F32
    whose_scaler: str = ""
    first_layer: Callable[..., nn.Module] | None = None

    def __str__(self) -> str:
        return self.name

    @property
    def skips(self) -> bool:
        """Whether an overflow costs a step and no more."""
        return bool(self.whose_scaler) or (self.is_ours and self.dtype != F32)

    @property
    def is_ours(self) -> bool:
        return issubclass(self.kind, Engine)

    def saves(self, key: str) -> bool:
        """Return whether checkpoints hold this state: not the step of SGD and Lion, because torch's SGD has none."""
        return key != "step" or not self.is_ours or self.kind._rule.ops.rule.saves_steps

    def optimizer(self, params: Iterable[Any], **more: Any) -> torch.optim.Optimizer:
        return self.kind(params, **self.options | more)

    def network(self, seed: int = 1) -> nn.Sequential:
        """Return a network whose sums in a first step are exact in any order."""
        torch.manual_seed(seed)
        if self.first_layer is None:
            layers = {"first": nn.Linear(16, 40), "act": nn.ReLU()}
        else:
            layers = {"first": self.first_layer(16, 40, activation="relu"), "act": nn.Identity()}
        model = nn.Sequential(OrderedDict(layers | {"last": nn.Linear(40, 5)}))
        with torch.no_grad():
            for param in model.parameters():
                param.copy_((param * 64).round() / 64)
        return model.to(self.dtype)

    def scaler(self) -> torch.amp.GradScaler:
        """Return a scaler whose scale moves during a training, and never rounds."""
        kind = _SCALERS.get(self.whose_scaler, torch.amp.GradScaler)
        return kind("cpu", init_scale=8.0, growth_interval=2, enabled=bool(self.whose_scaler))

    def with_the_other_scaler(self) -> "DropIn":
        return replace(self, whose_scaler="our" if self.whose_scaler == "torch's" else "torch's")

    def with_torchs_layer(self) -> "DropIn":
        return replace(self, first_layer=None)


def _adamw(dtype: torch.dtype, state_dtype: torch.dtype, master: str = "split", scaler: str = "") -> DropIn:
    kept = "" if dtype == F32 else f", {master} master"
    name = f"{_WORDS[dtype]}{kept}, {_WORDS[state_dtype]} state"
    if scaler:
        name = f"{scaler} scaler, our AdamW, {name}"
    return DropIn(name, AdamW, {"lr": LR, "master": master, "state_dtype": state_dtype}, dtype, scaler)


def _of_each(kind: type[Engine], **options: Any) -> list[DropIn]:
    """Return the drop-ins of an optimizer other than AdamW. AdamW's columns try what optimizers have in common."""
    name = kind.__name__
    return [
        DropIn(f"{name}, fp32", kind, {"lr": LR, "state_dtype": F32} | options),
        DropIn(f"{name}, bf16, split master, bf16 state", kind, {"lr": LR, "state_dtype": B16} | options, B16),
    ]


_STATE_DTYPES = (F32, B16, torch.int8)
_TORCHS = DropIn("our scaler, torch's AdamW", torch.optim.AdamW, {"lr": LR, "foreach": False}, F32, "our")
_LAYER = replace(_TORCHS, name="fp32 layer", whose_scaler="", first_layer=LinearAct)
COLUMNS = {
    "fp32": [_adamw(F32, it) for it in _STATE_DTYPES],
    "split": [_adamw(dtype, it) for dtype in (B16, F16) for it in _STATE_DTYPES],
    "copy": [_adamw(dtype, it, "fp32") for dtype in (B16, F16) for it in _STATE_DTYPES],
    "scaler": [
        _TORCHS,
        _adamw(F32, F32, scaler="our"),
        _adamw(F32, F32, scaler="torch's"),
        _adamw(F16, B16, scaler="our"),
        _adamw(F16, F32, "fp32", scaler="our"),
    ],
    "others": [*_of_each(Adam), *_of_each(SGD, lr=1e-4, momentum=0.9), *_of_each(Lion)],
    "layer": [_LAYER, replace(_LAYER, name="bf16 layer", dtype=B16)],
}
DROP_INS = {it.name: it for column in COLUMNS.values() for it in column}
