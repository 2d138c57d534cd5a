"""Compares the host's time in a step of DTensors with torch's. One process holds all parts."""

import atexit
from typing import Any

import torch
from torch import distributed
from torch.nn import Parameter

from mpkernels.bench import steps
from mpkernels.bench.pairs import Pair
from mpkernels.bench.settings import Setting, Sizes

if distributed.is_available():  # without it, all other cases can be measured
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

SIZES = Sizes("300x256-host-cost", ((16, 16),) * 300, clock="host")


def compare(setting: Setting) -> Pair:
    return Pair(
        lambda: steps.our_step(_parameters(setting), "cpu").finish,
        lambda: steps.torchs_step(_parameters(setting), "cpu", steps.fused).finish,
        moved=int(steps.bytes_of_our_step(torch.float32) * setting.sizes.elements),
        clock=setting.sizes.clock,
        is_counted=True,
    )


def _parameters(setting: Setting) -> list[Parameter]:
    if not distributed.is_initialized():
        alone = distributed.HashStore()  # type: ignore[attr-defined]
        distributed.init_process_group("gloo", store=alone, rank=0, world_size=1)
        atexit.register(distributed.destroy_process_group)
    mesh = init_device_mesh("cpu", (1,))

    def place(value: torch.Tensor) -> Any:
        return distribute_tensor(value, mesh, [Shard(0)])

    params = [Parameter(place(value)) for value in setting.tensors()]
    for param, value in zip(params, setting.tensors(), strict=True):
        param.grad = place(value.flip(0))
    return params


def why_not() -> str:
    """Return why this can't be measured here."""
    return "" if distributed.is_available() and distributed.is_gloo_available() else "needs torch with gloo"
