"""Runs every kernel of every op on small tensors, and whole steps, for compute-sanitizer to watch.

``python -m benchmarks.every_op cuda``.
"""

import sys
from functools import partial

import torch

import mpkernels
from mpkernels.doctor.samples import SAMPLES
from mpkernels.nn import LinearAct
from mpkernels.ops import _registry
from mpkernels.optim import SGD, Adam, AdamW, Lion, Muon


def calls(device: torch.device) -> int:
    made = 0
    for name, samples in SAMPLES.items():
        for kernel in mpkernels.backends(name, device):
            with mpkernels.backend(kernel):
                for sample in samples:
                    _registry._ops[name](*sample.arguments(device))
                    made += 1
    return made


def steps(device: torch.device) -> None:
    for dtype, options in (
        (torch.float32, {"max_norm": 1.0}),
        (torch.bfloat16, {"max_norm": 1.0, "state_dtype": torch.int8}),
        (torch.float16, {"guard": True, "master": "fp32"}),
    ):
        network = LinearAct(33, 129, device=device, dtype=dtype)
        for make in (AdamW, Adam, partial(SGD, momentum=0.9), SGD, Lion, Muon):
            optimizer = make([it for it in network.parameters() if make is not Muon or it.ndim == 2], **options)
            for _ in range(2):
                network(torch.randn(17, 33, device=device, dtype=dtype)).float().square().mean().backward()
                optimizer.step()


def main(device: torch.device) -> None:
    made = calls(device)
    steps(device)
    if device.type == "cuda":
        torch.cuda.synchronize()
    print(f"{made} calls and the steps ran on {device}")


if __name__ == "__main__":
    main(torch.device(sys.argv[1]))
