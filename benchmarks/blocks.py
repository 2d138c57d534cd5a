"""Our MLPs beside torch's and Liger's, forward and backward, with fp32 weights under autocast."""

from functools import partial
from typing import NamedTuple

from torch import Tensor, nn

from benchmarks import other_libraries
from mpkernels.bench.linear import MakeLayer, Shape, forward_and_backward
from mpkernels.bench.pairs import Make, Pair
from mpkernels.bench.settings import Setting
from mpkernels.nn import MLP


class TorchsGatedMLP(nn.Module):
    def __init__(self, features: int, hidden: int, activation: nn.Module) -> None:
        super().__init__()
        self.activation = activation
        self.gate, self.up = (nn.Linear(features, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.activation(self.gate(x)) * self.up(x))
        return y


def torchs_mlp(features: int, hidden: int) -> nn.Module:
    return nn.Sequential(nn.Linear(features, hidden), nn.GELU(), nn.Linear(hidden, features))


class BlockPair(NamedTuple):
    ours: MakeLayer
    torchs: MakeLayer
    op: str  # does the work
    products: int  # how many the forward computes


def _gated(activation: str, torchs: nn.Module) -> BlockPair:
    ours = partial(MLP, bias=False, gated=True, activation=activation)
    return BlockPair(ours, partial(TorchsGatedMLP, activation=torchs), "linear_gated", 3)


BLOCKS = {
    "gelu_mlp": BlockPair(MLP, torchs_mlp, "linear_act", 2),
    "swiglu_mlp": _gated("silu", nn.SiLU()),
    "geglu_mlp": _gated("gelu_tanh", nn.GELU(approximate="tanh")),
}
SHAPES = {
    "cpu": [Shape(64, 768, 3072), Shape(512, 768, 3072)],
    "cuda": [Shape(rows, *layer) for layer in ((1024, 4096), (4096, 14336)) for rows in (512, 8192)],
}


def _side(setting: Setting, layer: MakeLayer, compiled: bool = False) -> Make:
    return forward_and_backward(setting, layer, setting.sizes.shapes[0][1], compiled)


def ours(setting: Setting, name: str, compiled: bool = False) -> Make:
    return _side(setting, BLOCKS[name].ours, compiled)


def torchs(setting: Setting, name: str, compiled: bool = False) -> Make:
    return _side(setting, BLOCKS[name].torchs, compiled)


def ligers(setting: Setting, name: str) -> Make:
    return _side(setting, partial(other_libraries.ligers_block, name))


def compare(setting: Setting, name: str, ours: Make, theirs: Make) -> Pair:
    rows, features, hidden = setting.sizes.shapes[0]
    flops = 3 * BLOCKS[name].products * 2 * rows * features * hidden
    return Pair(ours, theirs, flops=flops, clock="device", is_counted=True)
