"""A diffusion transformer of diffusers, in bf16: AdamW with masters and 8-bit moments beside Adafactor with stochastic
rounding, by which trainers of diffusion models save memory.

    python examples/diffusers_dit.py

In bf16, each way frees every grad in the backward. The model is a small DiT, made of a config. It learns to denoise
rectangles. Each way sees the same batches.
"""

from functools import partial

import torch
from diffusers import DDPMScheduler, DiTTransformer2DModel
from diffusers.utils import logging
from torch.nn import functional
from transformers.optimization import Adafactor

from mpkernels.optim import AdamW

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZE, ROWS, STEPS, LR = 8, 16, 120, 3e-4
NOISES = DDPMScheduler()


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {"sample_size": SIZE, "patch_size": 2, "in_channels": 1, "out_channels": 1, "num_embeds_ada_norm": 4}
    return DiTTransformer2DModel(num_attention_heads=2, attention_head_dim=16, num_layers=2, **sizes).to(DEVICE)


def loss_of(model: torch.nn.Module, seed: int) -> torch.Tensor:
    """Return the error in the noise that the model finds in noisy rectangles, whose class is their height."""
    torch.manual_seed(seed)
    noise, times = torch.randn(ROWS, 1, SIZE, SIZE), torch.randint(NOISES.config.num_train_timesteps, (ROWS,))
    heights, corners, places = torch.randint(4, (ROWS,)), torch.randint(5, (ROWS, 2)), torch.arange(SIZE)
    rows, columns = ((places >= it[:, None]) & (places < it[:, None] + heights[:, None] + 1) for it in corners.T)
    images = 2.0 * (rows[:, None, :, None] & columns[:, None, None, :]) - 1
    noisy, noise, times, heights = (
        it.to(DEVICE) for it in (NOISES.add_noise(images, noise, times), noise, times, heights)
    )
    found = model(noisy.to(next(model.parameters()).dtype), times, heights).sample
    return functional.mse_loss(found.float(), noise)


def ours(params, lr: float) -> AdamW:
    optimizer = AdamW(params, lr=lr, state_dtype="int8", guard=False)  # the guard would need all grads at once
    optimizer.release_grads()
    return optimizer


class RoundedAdafactor:
    """Adafactor over an fp32 copy of one parameter at a time, in the backward. Each weight is rounded up or down at
    random, so that small steps count on average."""

    def __init__(self, params, lr: float) -> None:
        self.state = {}
        for param in params:
            copy = torch.nn.Parameter(torch.empty(0, device=param.device))
            inner = adafactor([copy], lr)
            param.register_post_accumulate_grad_hook(partial(self._step, inner, copy))

    @torch.no_grad()
    def _step(self, inner: Adafactor, copy: torch.Tensor, param: torch.Tensor) -> None:
        copy.data, copy.grad = param.float(), param.grad.float()
        inner.step()
        bits = copy.view(torch.int32)
        param.copy_(((bits + torch.randint_like(bits, 2**16)) & -(2**16)).view(torch.float32))
        copy.data, copy.grad, param.grad = copy.new_empty(0), None, None
        self.state[param] = inner.state[copy]

    def step(self) -> None: ...

    def zero_grad(self) -> None: ...


adafactor = partial(Adafactor, scale_parameter=False, relative_step=False)
WAYS = {
    "AdamW, fp32 weights": (torch.float32, torch.optim.AdamW),
    "AdamW, bf16 weights alone": (torch.bfloat16, torch.optim.AdamW),
    "AdamW, split masters, int8": (torch.bfloat16, ours),
    "Adafactor, fp32 weights": (torch.float32, adafactor),
    "Adafactor, rounded at random": (torch.bfloat16, RoundedAdafactor),
}


def train(dtype: torch.dtype, make) -> tuple[float, float]:
    """Return bytes a parameter and the loss on batches that the model wasn't trained on."""
    model = network().to(dtype)
    optimizer = make(model.parameters(), lr=LR)
    for step in range(STEPS):
        loss_of(model, step).backward()
        kept = [it.grad for it in model.parameters() if it.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    states = [it for state in optimizer.state.values() for it in state.values() if isinstance(it, torch.Tensor)]
    size = sum(it.numel() * it.itemsize for it in (*model.parameters(), *kept, *states))
    with torch.no_grad():
        losses = [loss_of(model, STEPS + batch).item() for batch in range(30)]
    return size / sum(it.numel() for it in model.parameters()), sum(losses) / len(losses)


def main() -> dict[str, tuple[float, float]]:
    """Return each way's bytes a parameter (weights, states, and the grads that a backward leaves) and its loss."""
    logging.set_verbosity_error()  # diffusers advises against `to` for models that keep some layers in fp32
    results = {}
    for name, way in WAYS.items():
        results[name] = size, loss = train(*way)
        print(f"{name:28}  {size:5.2f} bytes a parameter  loss {loss:.4f}")
    return results


if __name__ == "__main__":
    main()
