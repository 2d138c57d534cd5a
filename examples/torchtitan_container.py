"""torchtitan: an optimizer container whose "AdamW" is ours, for ``training.dtype="bfloat16"``.

    python examples/torchtitan_container.py

Put the class beside your model's config, and ``optimizer=adamw(lr=3e-4)`` into the trainer's config in place of
``default_adamw``. Patterns, learning-rate schedules, and checkpoints by name remain torchtitan's.

Where torchtitan isn't installed, a substitute for its container runs: substitutes/torchtitan.py.
"""

from dataclasses import dataclass

import torch

from mpkernels.optim import AdamW

try:
    from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
except ImportError:
    from substitutes.torchtitan import OptimizersContainer, ParamGroupConfig


class MixedPrecision(OptimizersContainer):
    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """A config that makes torchtitan build the class around it."""

    @staticmethod
    def _resolve_optimizer_factory(name):
        return AdamW if name == "AdamW" else OptimizersContainer._resolve_optimizer_factory(name)


def adamw(**options) -> MixedPrecision.Config:
    everything = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs=options)
    return MixedPrecision.Config(param_groups=[everything])


def main() -> tuple[float, float]:
    """Return the first loss and the last one."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 1)).to(torch.bfloat16)
    optimizers, losses = adamw(lr=1e-2).build(model_parts=[model]), []
    for step in range(40):
        if step == 20:  # go on from the state dict, as after a restart
            saved, optimizers = optimizers.state_dict(), adamw(lr=1e-2).build(model_parts=[model])
            optimizers.load_state_dict(saved)
        inputs = torch.randn(256, 32)
        loss = (model(inputs.bfloat16()).float() - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizers.step()
        optimizers.zero_grad()
        losses.append(loss.item())
    print(f"{OptimizersContainer.__module__}: loss {losses[0]:.2f} -> {losses[-1]:.2f}")
    print("saved:", *(key for key in saved if key.startswith("state.0.weight.")))
    return losses[0], losses[-1]


if __name__ == "__main__":
    main()
