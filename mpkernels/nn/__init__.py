"""torch.nn's modules, fused."""

from mpkernels.nn.linear_act import LinearAct

__all__ = ["LinearAct"]
