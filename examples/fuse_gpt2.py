"""Fuse the MLPs of GPT-2, train a few steps, and take the fusing back.

    pip install '.[integrations]'
    python examples/fuse_gpt2.py

The model is made from a config and learns bytes of Python's own sources, so that nothing is downloaded; with
``from_pretrained`` it is the same.
"""

import sysconfig
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from mpkernels.nn import fuse, unfuse
from mpkernels.optim import AdamW

CONTEXT, BATCH, STEPS = 64, 8, 20
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def batches():
    source = Path(sysconfig.get_paths()["stdlib"], "argparse.py").read_bytes()
    text = torch.tensor(list(source[: STEPS * BATCH * CONTEXT]), device=DEVICE)
    return text.view(STEPS, BATCH, CONTEXT)


def main() -> tuple[float, float]:
    """Return the first loss and the last one."""
    torch.manual_seed(0)
    shape = {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT, "vocab_size": 256}
    config = GPT2Config(**shape, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config).to(DEVICE)
    report = fuse(model)
    print(report)
    first = batches()[0]
    saved = report.saved_bytes({"input_ids": first, "labels": first})
    print(f"\nsaved for the backward: {saved.plain / 2**20:.1f} MiB plain, {saved.fused / 2**20:.1f} MiB fused")

    optimizer, losses = AdamW(model.parameters(), lr=1e-3), []
    for batch in batches():
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")
    unfuse(model)  # the classes are transformers' own again
    return losses[0], losses[-1]


if __name__ == "__main__":
    main()
