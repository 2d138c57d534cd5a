"""The ways to compute linear layers and MLPs, on one device: what mpkernels/selector/rule.py takes a chip's lines from.

``python -m benchmarks.rule cuda`` tunes each case, without what the disk knows, and prints what each way takes.
"""

import sys

import torch

import mpkernels
from mpkernels.nn import MLP, LinearAct
from mpkernels.selector.tune import TuneReport

CASES = {  # the few that tell most come first; 28672 is Llama 70B's
    "linear_act 768": (lambda: LinearAct(768, 3072, activation="gelu_tanh"), 768),
    "linear_act 4096": (lambda: LinearAct(4096, 14336, activation="gelu"), 4096),
    "gated 28672": (lambda: MLP(8192, 28672, bias=False, gated=True), 8192),
    "mlp 768": (lambda: MLP(768, 3072, activation="gelu_tanh"), 768),
    "mlp 4096": (lambda: MLP(4096, 16384), 4096),
    "gated 11008": (lambda: MLP(4096, 11008, bias=False, gated=True), 4096),
}
ROWS, FEW = 8192, 64


def measure(device: str, name: str, rows: int) -> TuneReport:
    make, features = CASES[name]
    with torch.device(device):
        model, x = make(), torch.randn(rows, features)
    with torch.autocast(device, torch.bfloat16):
        return mpkernels.tune(model, x, again=True)


def main(device: str, *only: str) -> None:
    for rows in (ROWS, FEW) if device == "cuda" else (FEW,):
        for name in only or CASES:
            print(measure(device, name, rows), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
