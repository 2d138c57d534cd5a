"""torch.nn's modules, fused."""

from mpkernels.nn.blocks import MLP, GatedLinear
from mpkernels.nn.fusing import fuse, unfuse
from mpkernels.nn.linear_act import LinearAct

__all__ = ["MLP", "GatedLinear", "LinearAct", "fuse", "unfuse"]
