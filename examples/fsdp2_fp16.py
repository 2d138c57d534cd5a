"""fp16 under FSDP2: one GradScaler, and all processes skip the same steps, as verl#4036 and lerobot#4652 need it.

    torchrun --standalone --nproc-per-node 2 examples/fsdp2_fp16.py

Weights and grads are fp16. Each process has a part of them, and AdamW keeps the fp32 masters of that part. Midway, the
second process alone meets a batch that overflows. One exchange tells all processes, and none of them waits for it on
the host: both skip, both halve the scale, and both go on with the same weights. fsdp2.py adds checkpoints.
"""

import gc
import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from mpkernels.amp import GradScaler
from mpkernels.optim import AdamW


def train(device: str) -> None:
    rank = dist.get_rank()
    torch.manual_seed(0)
    layers = torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 1)
    model = torch.nn.Sequential(*layers).to(device, torch.float16)
    for module in (model[0], model):
        fully_shard(module)
    optimizer, scaler = AdamW(model.parameters(), lr=1e-2, max_norm=1.0), GradScaler(init_scale=1024.0)

    for step in range(40):
        inputs = torch.randn(64, 32, generator=torch.Generator().manual_seed(1000 * rank + step)).to(device)
        loss = (model(inputs.half()).float() - inputs.sum(1, keepdim=True)).square().mean()
        if (step, rank) == (20, 1):
            loss = loss * 1e6
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if rank == 0 and step % 10 == 9:
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)

    total = sum(param.full_tensor().double().sum().item() for param in model.parameters())
    skipped, scale = int(scaler.skipped_steps), scaler.get_scale()
    print(f"rank {rank}: {skipped} step skipped, scale {scale:g}, the weights add up to {total!r}", flush=True)


def main() -> None:
    if not dist.is_torchelastic_launched():
        raise SystemExit(f"start it by torchrun --standalone --nproc-per-node 2 {__file__}")
    has_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = f"cuda:{os.environ['LOCAL_RANK']}" if has_gpus else "cpu"
    if has_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if has_gpus else "gloo")
    train(device)
    dist.destroy_process_group()
    gc.collect()  # frees the model, whose cycles hold gloo's threads: a thread that outlives Python aborts (torch 2.13)


if __name__ == "__main__":
    main()
