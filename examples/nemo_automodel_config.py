"""NeMo Automodel: one line of its YAML, and bf16 weights have fp32 masters.

    optimizer:
      _target_: mpkernels.optim.AdamW     # was: torch.optim.AdamW
      lr: 1.0e-2
      betas: [0.9, 0.95]

    python examples/nemo_automodel_config.py

Automodel imports what ``_target_`` names, and hands it the model's parameters and the other keys. Set
``torch_dtype: bfloat16`` under ``model:`` for bf16 weights. Automodel then warns of bf16 weights under torch's Adam,
because our class is a subclass of it: the fp32 masters that it asks for are there. It clips by its own
``clip_grad_norm:``, before the step.

Where nemo-automodel isn't installed, a substitute for its ``build_optimizer`` runs: substitutes/nemo_automodel.py.
"""

import torch

try:
    from nemo_automodel.components.optim.optimizer import build_optimizer
except ImportError:
    from substitutes.nemo_automodel import build_optimizer

CONFIG = {"_target_": "mpkernels.optim.AdamW", "lr": 1e-2, "betas": [0.9, 0.95]}  # as in the YAML above


def main() -> tuple[float, float]:
    """Return the first loss and the last one."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 1)).to(torch.bfloat16)
    target, options = CONFIG["_target_"], {key: value for key, value in CONFIG.items() if key != "_target_"}
    [optimizer] = build_optimizer(model, (target, options))  # Automodel makes one for each part of the model
    print("built by", build_optimizer.__module__)

    losses = []
    for step in range(40):
        inputs = torch.randn(256, 32)
        loss = (model(inputs.bfloat16()).float() - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 10 == 9:
            print(f"step {step + 1}: loss {losses[-1]:.3f}")
    print(f"state of a {model[0].weight.dtype} weight: {', '.join(optimizer.state[model[0].weight])}")
    return losses[0], losses[-1]


if __name__ == "__main__":
    main()
