"""fp16 weights on a T4, a V100 or another GPU without bf16: masters, and a GradScaler that takes fp16 grads.

    python examples/t4_fp16.py     # without a GPU it runs on the CPU, in the same dtypes

torch's GradScaler refuses grads of fp16 weights, so torch.amp needs fp32 weights: 16 bytes a parameter with grad and
AdamW's moments. fp16 weights with masters take 14, or 8 with ``state_dtype=torch.int8``.
"""

import torch

from mpkernels.amp import GradScaler
from mpkernels.optim import AdamW

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def network(dtype: torch.dtype) -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.GELU(), torch.nn.Linear(256, 1)).to(DEVICE, dtype)


def train(dtype: torch.dtype, **options) -> tuple[float, int, float]:
    """Return the last loss, how many steps were skipped, and bytes a parameter: weight, grad and state."""
    model = network(dtype)
    optimizer = AdamW(model.parameters(), lr=1e-3, max_norm=1.0, **options)
    scaler = GradScaler(init_scale=2.0**20)  # too high for fp16: it has to come down first
    for _ in range(200):
        optimizer.zero_grad()
        inputs = torch.randn(256, 32, device=DEVICE)
        loss = (model(inputs.to(dtype)).float() - inputs[:, :8].sum(1, keepdim=True)).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)  # unscales, clips and updates, or skips, without making the host wait
        scaler.update()
    tensors = [it for param in model.parameters() for it in (param, param.grad, *optimizer.state[param].values())]
    size = sum(it.nbytes for it in tensors if it.ndim) / sum(it.numel() for it in model.parameters())
    return loss.item(), int(scaler.skipped_steps), size


def refusal_of_torch() -> str:
    model, scaler = network(torch.float16), torch.amp.GradScaler(DEVICE)
    scaler.scale(model(torch.ones(8, 32, device=DEVICE).half()).float().mean()).backward()
    try:
        scaler.unscale_(torch.optim.AdamW(model.parameters()))
    except ValueError as error:
        return str(error)
    return "took them"


def main() -> dict[str, tuple[float, int, float]]:
    print("torch's GradScaler, given fp16 grads:", refusal_of_torch())
    results = {"fp32 weights": train(torch.float32), "fp16 weights": train(torch.float16)}
    results["fp16, 8-bit moments"] = train(torch.float16, state_dtype=torch.int8)
    for name, (loss, skipped, size) in results.items():
        print(f"{name:19} {size:5.2f} bytes a parameter, loss {loss:.4f}, {skipped} steps skipped")
    return results


if __name__ == "__main__":
    main()
