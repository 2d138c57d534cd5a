"""before.py's loop with mpkernels: only the imports differ."""

import torch

from mpkernels.amp import GradScaler, autocast, clip_grad_norm_
from mpkernels.optim import AdamW

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 1)).to(device)
optimizer = AdamW(model.parameters(), lr=3e-3)
scaler = GradScaler(device)

for step in range(201):
    inputs = torch.randn(256, 64, device=device)
    optimizer.zero_grad()
    with autocast(device, dtype=torch.float16):
        loss = (model(inputs) - inputs[:, :8].sum(1, keepdim=True)).square().mean()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    if step % 50 == 0:
        print(f"step {step}: loss {loss.item():.4f}, scale {scaler.get_scale():.0f}")
