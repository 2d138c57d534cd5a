"""FSDP2 with fp16, clipping, and checkpoints from which any number of processes goes on, on CPUs or a GPU each.

    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/fsdp2.py [folder]

A checkpoint counts once torch.distributed.checkpoint has written its ``.metadata``, which it does last. Where a process
dies, torchrun starts all anew, and they go on from the last checkpoint that counts.
"""

import gc
import os
import sys
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from mpkernels.amp import GradScaler
from mpkernels.optim import AdamW

STEPS, EVERY = 40, 5


def batch(step: int, rank: int, device: str):
    """Return a random batch, another one in each process, and the same again after a restart."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    inputs = torch.randn(64, 32, generator=generator)
    return inputs.to(device), inputs.sum(1, keepdim=True).to(device)


class Training:
    def __init__(self, device: str) -> None:
        torch.manual_seed(0)
        layers = torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 1)
        self.model = torch.nn.Sequential(*layers).to(device, torch.float16)
        for module in (self.model[0], self.model):
            fully_shard(module)
        self.optimizer = AdamW(self.model.parameters(), lr=1e-2, max_norm=1.0)
        self.scaler = GradScaler(device.partition(":")[0])
        self.scaler.scale(torch.zeros((), device=device))  # makes the scale, so that the scaler has one to save

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        loss = torch.nn.functional.mse_loss(self.model(inputs.half()).float(), targets)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return loss.item()

    def state(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "scaler": self.scaler.state_dict()}

    def load(self, folder: Path) -> None:
        state = self.state()
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])


def last_complete(folder: Path) -> int:
    """Return the step of the last checkpoint that counts; 0 if there is none."""
    return max((int(it.parent.name) for it in folder.glob("*/.metadata")), default=0)


def train(device: str, folder: Path) -> None:
    rank, training = dist.get_rank(), Training(device)
    if first := last_complete(folder):
        training.load(folder / str(first))
        if rank == 0:
            print(f"goes on from step {first}", flush=True)
    for step in range(first, STEPS):
        loss = training.step(*batch(step, rank, device))
        if (step + 1) % EVERY == 0:
            dcp.save(training.state(), checkpoint_id=folder / str(step + 1))
            if rank == 0:
                print(f"step {step + 1:2}  loss {loss:.6f}  scale {training.scaler.get_scale():g}", flush=True)


def main() -> None:
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    if not dist.is_torchelastic_launched():
        raise SystemExit(f"start it by torchrun --standalone --nproc-per-node 2 {__file__}")
    has_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    store, rank, world = next(dist.rendezvous("env://"))
    # torchrun keeps its store over restarts, where a process might find the address of a dead one (torch 2.13).
    store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
    dist.init_process_group("nccl" if has_gpus else "gloo", store=store, rank=rank, world_size=world)
    device = f"cuda:{os.environ['LOCAL_RANK']}" if has_gpus else "cpu"
    if has_gpus:
        torch.cuda.set_device(device)
    if len(sys.argv) > 1:
        train(device, Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            dist.broadcast_object_list(folders := [folder], 0)
            train(device, Path(folders[0]))
            dist.barrier()
    dist.destroy_process_group()
    gc.collect()  # frees the model, whose cycles hold gloo's threads: a thread that outlives Python aborts (torch 2.13)


if __name__ == "__main__":
    main()
