"""Stand-ins for diffusers' projections, with the same names, module name and computation."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

__name__ = "diffusers.models.activations"  # the module name that the classes below get


class _Projection(nn.Module):
    def __init__(self, width, hidden, factor=1):
        super().__init__()
        self.proj = nn.Linear(width, factor * hidden)


class GELU(_Projection):
    def __init__(self, width, hidden, approximate="none"):
        super().__init__(width, hidden)
        self.approximate = approximate

    def gelu(self, gate):
        if gate.device.type == "mps" and gate.dtype == torch.float16:
            return F.gelu(gate.float(), approximate=self.approximate).to(gate.dtype)
        return F.gelu(gate, approximate=self.approximate)

    def forward(self, x):
        x = self.proj(x)
        return self.gelu(x)


class GEGLU(_Projection):
    def __init__(self, width, hidden):
        super().__init__(width, hidden, factor=2)

    def gelu(self, gate):
        return F.gelu(gate)

    def forward(self, x, *others, **named):
        if others or named.get("scale") is not None:
            raise TypeError("scale is gone")
        x = self.proj(x)
        if x.device.type == "npu":
            return x
        x, gate = x.chunk(2, dim=-1)
        return x * self.gelu(gate)


class SwiGLU(_Projection):
    def __init__(self, width, hidden):
        super().__init__(width, hidden, factor=2)
        self.activation = nn.SiLU()

    def forward(self, x):
        x = self.proj(x)
        x, gate = x.chunk(2, dim=-1)
        return x * self.activation(gate)


class LinearActivation(_Projection):
    def __init__(self, width, hidden):
        super().__init__(width, hidden)
        self.activation = nn.SiLU()

    def forward(self, x):
        x = self.proj(x)
        return self.activation(x)


class ApproximateGELU(_Projection):
    """An activation that mpkernels doesn't have."""

    def forward(self, x):
        x = self.proj(x)
        return x * torch.sigmoid(1.702 * x)
