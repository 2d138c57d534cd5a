"""torch.nn's modules, fused."""

from mpkernels.nn.fusing import fuse, unfuse
from mpkernels.nn.linear_act import LinearAct

__all__ = ["LinearAct", "fuse", "unfuse"]
