"""DistributedDataParallel with fp16 and gradient accumulation, on CPUs or a GPU each.

    torchrun --standalone --nproc-per-node 2 examples/ddp.py

The loop is the one for a single process. ``accumulate`` is handed the model, and lets the processes exchange grads once
a step, not once a batch. An overflow in one process is seen by all: what they exchange is inf, and all skip the step.
"""

import gc
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from mpkernels.amp import Policy, accumulate
from mpkernels.optim import AdamW

STEPS, EVERY = 20, 2


def batches(rank: int, device: str):
    """Return random batches, other ones in each process."""
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STEPS * EVERY):
        inputs = torch.randn(64, 32, generator=generator)
        yield inputs.to(device), inputs.sum(1, keepdim=True).to(device)


def train(device: str) -> None:
    rank, kind = dist.get_rank(), device.partition(":")[0]

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 1)).to(device)
    model = DistributedDataParallel(model)
    policy = Policy("mixed_float16")
    scaler = policy.scaler(kind)
    optimizer = AdamW(model.parameters(), lr=1e-2)

    steps = 0
    for micro in accumulate(batches(rank, device), EVERY, optimizer, model=model, scaler=scaler, max_norm=1.0):
        inputs, targets = micro.batch
        with policy.autocast(kind):
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
        micro.backward(loss)
        steps += micro.is_last
        if micro.is_last and rank == 0 and steps % 5 == 0:
            print(f"step {steps:2}  loss {loss.item():7.3f}")

    total = sum(param.detach().double().sum().item() for param in model.parameters())
    print(f"rank {rank}: the weights add up to {total!r}")


def main() -> None:
    if not dist.is_torchelastic_launched():
        raise SystemExit(f"start it by torchrun --standalone --nproc-per-node 2 {__file__}")
    has_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    dist.init_process_group("nccl" if has_gpus else "gloo")
    train(f"cuda:{os.environ['LOCAL_RANK']}" if has_gpus else "cpu")
    dist.destroy_process_group()
    gc.collect()  # frees the model, whose cycles hold gloo's threads: a thread that outlives Python aborts (torch 2.13)


if __name__ == "__main__":
    main()
