"""One training for all cells, and the verdict on what a tool has made of it."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.hard_grads import same_bits
from tests.matrix.drop_ins import DropIn

HALF, STEPS = 3, 6
FIRST, REST, ALL = range(HALF), range(HALF, STEPS), range(STEPS)
BAD_STEP = 4  # if the drop-in skips, the second part of this batch has an infinite loss
PARTS = (0, 1)
Result = dict[str, Tensor]


def batch(number: int, part: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return inputs and targets: multiples of a half, which 16 bits hold exactly."""
    generator = torch.Generator().manual_seed(2 * number + part)
    return tuple(torch.randint(-4, 5, (8, n), generator=generator).to(dtype) / 2 for n in (16, 5))


class Run:
    """A model in training. Tools put others in place of its parts."""

    def __init__(self, drop_in: DropIn, parts: tuple[int, ...] = PARTS) -> None:
        """``parts``: the parts of each batch that this process sees."""
        self.drop_in, self.parts = drop_in, parts
        self.model: Any = drop_in.network()
        self.optimizer: Any = drop_in.optimizer(self.model.parameters())
        self.scaler: Any = drop_in.scaler()

    @property
    def dtype(self) -> torch.dtype:
        return self.optimizer.param_groups[0]["params"][0].dtype

    def loss(self, number: int, part: int) -> Tensor:
        inputs, targets = batch(number, part, self.dtype)
        loss = (self.model(inputs) - targets).float().square().sum()
        return loss * math.inf if self.is_bad(number, part) else loss

    def is_bad(self, number: int, part: int) -> bool:
        return self.drop_in.skips and number == BAD_STEP and part == 1

    def backward(self, number: int) -> None:
        """Run the backward of the mean over the parts, as in distributed training."""
        for part in self.parts:
            self.scaler.scale(self.loss(number, part) / len(self.parts)).backward()

    def steps(self, numbers: Any = ALL) -> None:
        for number in numbers:
            self.optimizer.zero_grad()
            self.backward(number)
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def result(self) -> Result:
        found = {name: param.detach().clone() for name, param in bare(self.model).named_parameters()}
        for name, param in bare(self.model).named_parameters():
            state = {key: it for key, it in self.optimizer.state.get(param, {}).items() if self.drop_in.saves(key)}
            found |= {f"{name}: {key}": state[key].clone() for key in sorted(state)}
        return found | self.scaler_result()

    def scaler_result(self) -> Result:
        return {f"scaler: {key}": torch.tensor(it) for key, it in self.scaler.state_dict().items()}


def bare(model: Any) -> nn.Module:
    """Return the model inside DistributedDataParallel and torch.compile."""
    while inner := getattr(model, "module", None) or getattr(model, "_orig_mod", None):
        model = inner
    return model


def plain(run: Run) -> Result:
    """Train without a tool."""
    run.steps()
    return run.result()


@dataclass(frozen=True)
class Tool:
    """A tool. ``function`` trains with it; ``oracle`` takes the finished run and returns the expected result."""

    function: Callable[[Run], Result | None]
    oracle: Callable[[Run], Result]


TOOLS: dict[str, Tool] = {}


def tool(like: Callable[[Run], Any] = plain, oracle: Callable[[Run], Result] | None = None) -> Any:
    """Make the function a row of the table, by its name. ``like`` trains the same in one process without the tool."""

    def trained_alike(run: Run) -> Result:
        return carried_out(like, Run(run.drop_in))

    def note(function: Callable[[Run], Any]) -> Callable[[Run], Any]:
        TOOLS[function.__name__.strip("_").replace("_", " ")] = Tool(function, oracle or trained_alike)
        return function

    return note


def midway(like: Callable[[Run], Any] = plain) -> Any:
    """Make a row of a function that does something between two halves of the training."""

    def note(function: Callable[[Run], Any]) -> Callable[[Run], Any]:
        def trained(run: Run) -> None:
            run.steps(FIRST)
            function(run)
            run.steps(REST)

        trained.__name__ = function.__name__
        return tool(like)(trained)

    return note


def carried_out(function: Callable[[Run], Result | None], run: Run) -> Result:
    result = function(run)
    return run.result() if result is None else result


def judge(name: str, drop_in: DropIn, parts: tuple[int, ...] = PARTS) -> tuple[str, str]:
    """Return ("right", ""), ("different", where), or the name of the exception and its message."""
    run = Run(drop_in, parts)
    try:
        got = {key: it.detach().clone() for key, it in carried_out(TOOLS[name].function, run).items()}
        want = TOOLS[name].oracle(run)
    except Exception as error:
        return type(error).__name__, str(error)
    if strange := [key for key, it in got.items() if type(it) is not Tensor]:
        return "different", f"{strange} are no plain tensors"
    if got.keys() != want.keys():
        return "different", f"{sorted(got)} instead of {sorted(want)}"
    wrong = [f"{key}: {distance(got[key], want[key])}" for key in want if not same_bits(got[key], want[key])]
    return ("different", "; ".join(wrong)) if wrong else ("right", "")


def distance(got: Tensor, want: Tensor) -> str:
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"{got.dtype} {tuple(got.shape)} instead of {want.dtype} {tuple(want.shape)}"
    off = (got.double() - want.double()).abs()
    return f"{int((off > 0).sum())} of {off.numel()} off by up to {off.max().item():.3g}"
