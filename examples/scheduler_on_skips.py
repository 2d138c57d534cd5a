"""A learning-rate schedule that doesn't advance where an overflow has cost the step.

    python examples/scheduler_on_skips.py

After a skip the weights are where they were, so the schedule should be, too: with a scale that begins too high, a
warmup would otherwise be over before the first step is taken.
"""

import torch

from mpkernels.amp import GradScaler, autocast
from mpkernels.optim import AdamW

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEPS = 40


def main() -> tuple[int, int]:
    """Return how many updates were skipped, and how many steps the schedule took."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 1)).to(DEVICE)
    optimizer = AdamW(model.named_parameters(), lr=1e-2)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=10)
    scaler = GradScaler(init_scale=2.0**24)  # too high for fp16

    for step in range(STEPS):
        inputs = torch.randn(128, 32, device=DEVICE)
        optimizer.zero_grad()
        with autocast(dtype=torch.float16):
            loss = (model(inputs).squeeze(1) - inputs.sum(1)).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

        # On a GPU this is the newest answer that has arrived, mostly that of the step before: for this step's answer,
        # the host would have to wait for the device. The schedule then moves a step late, which no training notices.
        was_skipped = scaler.step_was_skipped
        if was_skipped is not None and not was_skipped:
            warmup.step()
        if step % 5 == 0:
            print(f"step {step:2}  loss {loss.item():7.3f}  lr {warmup.get_last_lr()[0]:.4f}")

    skipped = int(scaler.skipped_steps)
    print(f"{skipped} of {STEPS} steps were skipped, {warmup.last_epoch} moved the schedule\n")
    print(scaler.overflow_report())
    return skipped, warmup.last_epoch


if __name__ == "__main__":
    main()
