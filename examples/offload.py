"""Masters and moments on the host: the GPU holds the weights, and each grad only during the backward.

    python examples/offload.py

Without a GPU everything is on the CPU.
"""

import sysconfig
from pathlib import Path

import torch
from torch.nn import functional

from mpkernels.optim import AdamW

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CONTEXT, ROWS, WIDTH = 32, 16, 64


class Transformer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = torch.nn.Embedding(256, WIDTH), torch.nn.Embedding(CONTEXT, WIDTH)
        layer = torch.nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True, norm_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = torch.nn.Linear(WIDTH, 256)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        mask = torch.nn.Transformer.generate_square_subsequent_mask(CONTEXT, text.device, self.head.weight.dtype)
        return self.head(self.layers(self.bytes(text) + self.places.weight, mask, is_causal=True))


def size(tensors) -> str:
    tensors = list(tensors)
    places = ", ".join(sorted({it.device.type for it in tensors}))
    return f"{sum(it.numel() * it.itemsize for it in tensors):,} bytes on {places or 'no device'}"


def main() -> tuple[float, float]:
    """Train on Python's own sources. Return the first loss and the last one."""
    torch.manual_seed(0)
    text = torch.tensor(list(Path(sysconfig.get_paths()["stdlib"], "argparse.py").read_bytes()))
    model = Transformer().to(DEVICE, torch.bfloat16)
    optimizer = AdamW(model.parameters(), lr=3e-3, max_norm=1.0, offload=True)
    optimizer.release_grads()

    losses = []
    for step in range(45):
        rows = text[torch.randint(len(text) - CONTEXT, (ROWS, 1)) + torch.arange(CONTEXT + 1)].to(DEVICE)
        loss = functional.cross_entropy(model(rows[:, :-1]).float().flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 15 == 14:
            print(f"step {step + 1}: loss {losses[-1]:.3f}, gradient norm {optimizer.grad_norm.item():.3f}")
    print("weights:", size(model.parameters()))
    print("grads:", size(it.grad for it in model.parameters() if it.grad is not None))
    print("masters and moments:", size(it for state in optimizer.state.values() for it in state.values()))
    return losses[0], losses[-1]


if __name__ == "__main__":
    main()
