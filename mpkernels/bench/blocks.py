"""MLPs, forward and backward, beside the same of torch's layers; fp32 weights, autocast."""

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn
from torch.nn import functional

from mpkernels.bench.linear import Shape, forward_and_backward
from mpkernels.bench.pairs import Pair
from mpkernels.bench.settings import Setting
from mpkernels.nn import MLP


class TorchsGatedMLP(nn.Module):
    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(features, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return y


def torchs_mlp(features: int, hidden: int) -> nn.Module:
    return nn.Sequential(nn.Linear(features, hidden), nn.GELU(), nn.Linear(hidden, features))


_Maker = Callable[[int, int], nn.Module]
BLOCKS: dict[str, tuple[_Maker, _Maker, int]] = {  # ours, torch's, and how many products the forward has
    "gelu_mlp": (MLP, torchs_mlp, 2),
    "swiglu_mlp": (partial(MLP, bias=False, gated=True), TorchsGatedMLP, 3),
}
SHAPES = {
    "cpu": [Shape(64, 768, 3072), Shape(512, 768, 3072)],
    "cuda": [Shape(rows, *layer) for layer in ((1024, 4096), (4096, 14336)) for rows in (512, 8192)],
}


def compare(setting: Setting, name: str, compiled: bool = False) -> Pair:
    rows, features, hidden = setting.case.shapes[0]
    ours, torchs, products = BLOCKS[name]
    return Pair(
        forward_and_backward(setting, ours, features),
        forward_and_backward(setting, torchs, features, compiled),
        flops=3 * products * 2 * rows * features * hidden,
        clock="device",
    )
