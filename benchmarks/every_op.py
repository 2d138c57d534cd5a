"""Every op once, small, and whole steps, for compute-sanitizer to watch: ``python -m benchmarks.every_op cuda``."""

import sys

import torch

from mpkernels.nn import LinearAct
from mpkernels.ops import _registry
from mpkernels.optim import AdamW
from tests.ops.test_ops import CALLS


def steps(device: str) -> None:
    for dtype, options in (
        (torch.float32, {"max_norm": 1.0}),
        (torch.bfloat16, {"max_norm": 1.0, "state_dtype": torch.int8}),
        (torch.float16, {"guard": True, "master": "fp32"}),
    ):
        network = LinearAct(33, 129, device=device, dtype=dtype)
        optimizer = AdamW(network.parameters(), **options)
        for _ in range(2):
            network(torch.randn(17, 33, device=device, dtype=dtype)).float().square().mean().backward()
            optimizer.step()


def main(device: str) -> None:
    for name, make in CALLS:
        _registry._ops[name](*make(device))
    steps(device)
    if device == "cuda":
        torch.cuda.synchronize()
    print(f"{len(CALLS)} calls and the steps ran on {device}")


if __name__ == "__main__":
    main(sys.argv[1])
