"""How long the optimizer's step takes, unscaling and clipping included, by torch and by us in turns."""

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import torch

from mpkernels import amp
from mpkernels.bench.pairs import Samples, seconds_waited
from mpkernels.demo.training import FP32, Training, Way

ROUNDS = 15
WARM_UP = 2  # rounds
TORCH_DEFAULT, TORCH_FUSED = "torch default", "torch fused"


class Timed(NamedTuple):
    seconds: dict[str, list[float]]  # of each round
    waited: float  # for a core that another program had: seconds per second

    def beside_torch(self, way: Way) -> Samples:
        return Samples(self.seconds[way.name], self.seconds[TORCH_FUSED], self.waited)


def measure(trainings: Sequence[Training]) -> Timed:
    """Time the steps in turns. It takes the grads of the trainings' last step, whose models it spoils."""
    contenders: dict[str, Callable[[], None]] = {}
    for it in trainings:
        if it.way == FP32:
            scaler = torch.amp.GradScaler(it.device.type, init_scale=1.0)
            contenders[TORCH_DEFAULT] = _step(it, it.new_optimizer(0.0, foreach=None), scaler)
            contenders[TORCH_FUSED] = _step(it, it.new_optimizer(0.0), scaler)
        elif it.way.is_ours:
            contenders[it.way.name] = _step(it, it.optimizer, amp.GradScaler(it.device.type, init_scale=1.0))
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    waited, start = -seconds_waited(), perf_counter()
    for _ in range(WARM_UP + ROUNDS):
        for name, step in contenders.items():
            seconds[name].append(_time(step, trainings[0].device))
    waited = (waited + seconds_waited()) / (perf_counter() - start)
    return Timed({name: each[WARM_UP:] for name, each in seconds.items()}, waited)


def _step(training: Training, optimizer: torch.optim.Optimizer, scaler: Any) -> Callable[[], None]:
    scaler.scale(torch.zeros((), device=training.device))  # without a first loss there is no scale yet
    return partial(training.update, optimizer, scaler)


def _time(step: Callable[[], None], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter() - start
