"""Muon on bf16 weights, as modded-nanoGPT trains them, with masters: ``mpkernels.optim.Muon``.

    python examples/muon_bf16.py

Muon steps the layers' matrices; AdamW the embedding, the head and the vectors. Both keep what bf16 weights lack of fp32
ones, so that nobody keeps the two halves of a weight by hand. The same training runs three times: with fp32 weights,
with bf16 weights and masters, and with bf16 weights alone, by torch's classes.
"""

import sysconfig
from pathlib import Path

import torch
from torch.nn import functional

from mpkernels.optim import AdamW, Muon, split_params

CONTEXT, WIDTH, STEPS = 8, 32, 100
TEXT = torch.tensor(list(Path(sysconfig.get_paths()["stdlib"], "argparse.py").read_bytes()))
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def network() -> torch.nn.Sequential:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(CONTEXT * WIDTH, WIDTH), torch.nn.GELU(), torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU()]
    return torch.nn.Sequential(torch.nn.Embedding(256, WIDTH), torch.nn.Flatten(), *layers, torch.nn.Linear(WIDTH, 256))


def train(dtype: torch.dtype, masters: bool) -> float:
    """Return the loss, on average over the last 30 steps."""
    model = network().to(DEVICE, dtype)
    matrices, others = split_params(model)
    kinds = (Muon, AdamW) if masters else (torch.optim.Muon, torch.optim.AdamW)
    optimizers = kinds[0](matrices, lr=1e-3, weight_decay=0.0), kinds[1](others, lr=1e-3)

    losses = []
    for _ in range(STEPS):
        rows = TEXT[torch.randint(len(TEXT) - CONTEXT, (128, 1)) + torch.arange(CONTEXT + 1)].to(DEVICE)
        loss = functional.cross_entropy(model(rows[:, :-1]).float(), rows[:, -1])
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return sum(losses[-30:]) / 30


def main() -> dict[str, float]:
    """Return each training's last loss."""
    ways = {"fp32": (torch.float32, False), "bf16, masters": (torch.bfloat16, True), "bf16": (torch.bfloat16, False)}
    losses = {name: train(*way) for name, way in ways.items()}
    for name, loss in losses.items():
        print(f"{name:14} loss {loss:.4f}, {loss - losses['fp32']:+.4f} beside fp32")
    return losses


if __name__ == "__main__":
    main()
