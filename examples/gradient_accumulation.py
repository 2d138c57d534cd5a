"""Gradient accumulation: four batches a step, as if they were one.

    python examples/gradient_accumulation.py

``accumulate`` divides the losses, unscales and clips once, when a step's grads are complete, and steps for the last few
batches, too. By hand each of these is easy to get wrong, and nothing fails when it is.
"""

import sysconfig
from pathlib import Path

import torch
from torch.nn import functional

from mpkernels.amp import Policy, accumulate
from mpkernels.optim import AdamW

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CONTEXT, ROWS, BATCHES, EVERY = 16, 32, 58, 4  # 58 is no multiple of 4


def batches():
    """Return batches of bytes of Python's own sources, and the byte that comes next."""
    source = Path(sysconfig.get_paths()["stdlib"], "argparse.py").read_bytes()
    text = torch.tensor(list(source))
    for _ in range(BATCHES):
        first = torch.randint(len(text) - CONTEXT, (ROWS, 1))
        yield text[first + torch.arange(CONTEXT + 1)].to(DEVICE).tensor_split([CONTEXT], dim=1)


def main() -> tuple[int, float]:
    """Return how many steps were taken, and the last loss."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Embedding(256, 16), torch.nn.Flatten(), torch.nn.Linear(16 * CONTEXT, 256), torch.nn.LayerNorm(256)
    ).to(DEVICE)
    policy = Policy("mixed_float16")
    scaler = policy.scaler()
    optimizer = AdamW(model.parameters(), lr=3e-3)

    steps = 0
    for micro in accumulate(batches(), EVERY, optimizer, scaler=scaler, max_norm=1.0):
        context, following = micro.batch
        with policy.autocast():
            loss = functional.cross_entropy(model(context), following.squeeze(1))
        micro.backward(loss)  # the fourth call clips, steps and clears the grads
        if micro.is_last:
            steps += 1
            print(f"step {steps:2}  loss {loss.item():.3f}")
    print(f"{BATCHES} batches made {steps} steps, the last one of {BATCHES % EVERY}")
    return steps, loss.item()


if __name__ == "__main__":
    main()
