"""adamw_'s common calls, in which all parameters are alike: their kernels have registers for nothing else."""

from collections.abc import Iterator
from typing import Any

import torch

BF16, FP32 = torch.bfloat16, torch.float32


def _step(dtype: torch.dtype, state_dtype: torch.dtype, master: torch.dtype | None = None) -> tuple[Any, ...]:
    param = torch.ones(512, dtype=dtype)
    masters = [] if master is None else [torch.ones_like(param, dtype=master)]
    scales = [torch.ones(4)] if state_dtype == torch.int8 else []
    states = [[torch.ones_like(param, dtype=state_dtype)] for _ in range(2)]
    hyperparameters = [[1e-3], [0.9], [0.999], [0.01], [1e-8], [False]]
    scalars = [torch.ones(()), torch.zeros(()), torch.ones((), dtype=torch.float64), 1.0, torch.zeros(2)]
    lists = [param], [param.clone()], *states, [], masters, scales, [torch.ones(())]
    return *lists, [1], *hyperparameters, [], *scalars, torch.zeros(()), None


def _adamw() -> Iterator[tuple[Any, ...]]:
    yield _step(FP32, FP32)
    yield _step(BF16, FP32, master=torch.int16)
    yield _step(BF16, BF16, master=torch.int16)
    yield _step(BF16, FP32, master=FP32)
    yield _step(BF16, torch.int8, master=torch.int16)
    yield _step(FP32, torch.int8)
    yield _step(torch.float64, torch.float64)


CALLS = {"adamw_": _adamw}
