"""Other libraries' optimizers and MLPs, measured where they are installed."""

import importlib
import importlib.util
from collections.abc import Iterable
from functools import partial
from importlib import metadata
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.nn import Module, Parameter

from mpkernels.bench.steps import MakeOptimizer


class Peer(NamedTuple):
    module: str
    optimizer: str
    options: dict[str, Any]
    moments: torch.dtype = torch.float32  # our optimizer's moments get the same dtype
    weights: torch.dtype = torch.float32  # and so do the weights
    needs_cuda: bool = False


PEERS = {
    "torchao-8bit": Peer("torchao.optim", "AdamW8bit", {}, torch.int8),
    "bitsandbytes-8bit": Peer("bitsandbytes.optim", "AdamW8bit", {}, torch.int8),
    "torch-optimi": Peer("optimi", "AdamW", {"lr": 1e-3}),
    "torch-optimi-kahan": Peer("optimi", "AdamW", {"lr": 1e-3}, torch.bfloat16, torch.bfloat16),
    "flashoptim-8bit": Peer(
        "flashoptim", "FlashAdamW", {"lr": 1e-3, "master_weight_bits": None}, torch.int8, needs_cuda=True
    ),
    "flashoptim-24bit": Peer("flashoptim", "FlashAdamW", {"lr": 1e-3}, torch.int8, torch.bfloat16, needs_cuda=True),
    "apex": Peer("apex.optimizers", "FusedAdam", {}, needs_cuda=True),
    "transformer-engine": Peer("transformer_engine.pytorch.optimizers", "FusedAdam", {}, needs_cuda=True),
}
MUON = Peer("pytorch_optimizer", "Muon", {})
LION = Peer("optimi", "Lion", {"lr": 1e-4})
LIGER = "liger_kernel.transformers"
LIGERS_BLOCKS = {"swiglu_mlp": ("LigerSwiGLUMLP", "silu"), "geglu_mlp": ("LigerGEGLUMLP", "gelu_pytorch_tanh")}


def versions() -> dict[str, str]:
    """Return the versions of those that are installed."""
    names = metadata.packages_distributions()
    packages = {module.partition(".")[0] for module in (*(it.module for it in PEERS.values()), LIGER)}
    return {names[it][0]: metadata.version(names[it][0]) for it in sorted(packages & names.keys())}


def why_not(module: str, needs_cuda: bool, device: str) -> str:
    """Return why a peer is left out here; "" if it is measured."""
    package = module.partition(".")[0]
    if needs_cuda and device != "cuda":
        return f"{package} needs CUDA"
    return f"{package} is not installed" if importlib.util.find_spec(package) is None else ""


def why_no_bf16_moments(device: str) -> str:
    """Return why torch's fused AdamW doesn't take bf16 moments of fp32 weights here; "" if it does."""
    if device != "cuda":
        return "torch's fused AdamW takes moments of another dtype on CUDA alone"
    return "" if torch.__version__ >= torch.torch_version.TorchVersion("2.13") else "torch is older than 2.13"


def maker(peer: Peer) -> MakeOptimizer:
    return partial(_make, peer)


def _make(peer: Peer, params: Iterable[Parameter]) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = getattr(importlib.import_module(peer.module), peer.optimizer)(
        params, **peer.options
    )
    return optimizer


def ligers_block(name: str, features: int, hidden: int) -> Module:
    """Return Liger's MLP, which takes its sizes from a model's configuration."""
    kind, activation = LIGERS_BLOCKS[name]
    config = SimpleNamespace(hidden_size=features, intermediate_size=hidden, hidden_act=activation)
    block: Module = getattr(importlib.import_module(LIGER), kind)(config)
    return block
