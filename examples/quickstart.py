"""Mixed precision, all of it: a fused layer, 16-bit weights with fp32 masters, clipping inside the step."""

import torch

from mpkernels.nn import LinearAct
from mpkernels.optim import AdamW

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = torch.nn.Sequential(LinearAct(64, 256, activation="gelu"), torch.nn.Linear(256, 1)).to(device, torch.bfloat16)
optimizer = AdamW(model.parameters(), lr=3e-3, max_norm=1.0)

for step in range(201):
    inputs = torch.randn(256, 64, device=device, dtype=torch.bfloat16)
    loss = (model(inputs) - inputs[:, :8].sum(1, keepdim=True)).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 50 == 0:
        print(f"step {step}: loss {loss.item():.4f}, gradient norm {optimizer.grad_norm.item():.3f}")
