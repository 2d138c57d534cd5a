"""Layers, gated layers and MLPs, ours and torch's: torch in fp64 is the oracle, torch in the tested dtype the rival."""

from typing import NamedTuple

import torch
from torch.nn.functional import linear

from mpkernels.functional import gated_linear, gated_mlp, linear_act, mlp
from mpkernels.ops.linear.block_kind import Kind, Parameters
from tests import exact
from tests.linear_cases import TORCH


class Block(NamedTuple):
    """A function of x and parameters. Ours and torch's take the parameters in the same order."""

    ours: object
    torchs: object
    shapes: object  # returns the parameters' shapes, from K, H, N
    bytes_saved: int  # for the backward, by each 16-bit hidden feature
    names: tuple[str, ...]  # that the package has for the parameters


def _stacked(x, weight, bias):
    return linear(x, weight, bias).chunk(2, -1)


BLOCKS = {
    "linear_act": Block(
        lambda a, x, w, b, **k: linear_act(x, w, b, a, **k),
        lambda a, x, w, b: TORCH[a](linear(x, w, b)),
        lambda k, h, n: [(h, k), (h,)],
        2,
        ("weight", "bias"),
    ),
    "linear_act without bias": Block(
        lambda a, x, w, **k: linear_act(x, w, None, a, **k),
        lambda a, x, w: TORCH[a](linear(x, w)),
        lambda k, h, n: [(h, k)],
        2,
        ("weight",),
    ),
    "gated": Block(
        lambda a, x, g, u, gb, ub, **k: gated_linear(x, g, u, gb, ub, a, **k),
        lambda a, x, g, u, gb, ub: TORCH[a](linear(x, g, gb)) * linear(x, u, ub),
        lambda k, h, n: [(h, k), (h, k), (h,), (h,)],
        4,
        ("weight", "up_weight", "bias", "up_bias"),
    ),
    "gated stacked": Block(
        lambda a, x, g, gb, **k: gated_linear(x, g, None, gb, activation=a, **k),
        lambda a, x, g, gb: (lambda both: TORCH[a](both[0]) * both[1])(_stacked(x, g, gb)),
        lambda k, h, n: [(2 * h, k), (2 * h,)],
        4,
        ("weight", "bias"),
    ),
    "mlp": Block(
        lambda a, x, w1, b1, w2, b2, **k: mlp(x, w1, b1, w2, b2, a, **k),
        lambda a, x, w1, b1, w2, b2: linear(TORCH[a](linear(x, w1, b1)), w2, b2),
        lambda k, h, n: [(h, k), (h,), (n, h), (n,)],
        2,
        ("weight", "bias", "out_weight", "out_bias"),
    ),
    "mlp without bias": Block(
        lambda a, x, w1, w2, **k: mlp(x, w1, None, w2, None, a, **k),
        lambda a, x, w1, w2: linear(TORCH[a](linear(x, w1)), w2),
        lambda k, h, n: [(h, k), (n, h)],
        2,
        ("weight", "out_weight"),
    ),
    "gated mlp": Block(
        lambda a, x, g, u, d, **k: gated_mlp(x, g, u, d, activation=a, **k),
        lambda a, x, g, u, d: linear(TORCH[a](linear(x, g)) * linear(x, u), d),
        lambda k, h, n: [(h, k), (h, k), (n, h)],
        4,
        ("weight", "up_weight", "out_weight"),
    ),
    "gated mlp stacked": Block(
        lambda a, x, g, gb, d, db, **k: gated_mlp(x, g, None, d, gb, None, db, a, **k),
        lambda a, x, g, gb, d, db: linear((lambda b: TORCH[a](b[0]) * b[1])(_stacked(x, g, gb)), d, db),
        lambda k, h, n: [(2 * h, k), (2 * h,), (n, h), (n,)],
        4,
        ("weight", "bias", "out_weight", "out_bias"),
    ),
}
MLPS = {name: block for name, block in BLOCKS.items() if "mlp" in name}


def arguments(name, dtype, sizes=(6, 8, 10, 7), device="cpu", seed=0):
    """Return x, the parameters, and dy, of a size that leaves z and h around 1."""
    generator = torch.Generator().manual_seed(seed)
    rows, inputs, hidden, outputs = sizes
    last = outputs if "mlp" in name else hidden
    shapes = [(rows, inputs), *BLOCKS[name].shapes(inputs, hidden, outputs), (rows, last)]
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    made[1:-1] = [it / max(it.shape[1], 1) ** 0.5 if it.dim() == 2 else it for it in made[1:-1]]
    return [it.to(dtype).to(device) for it in made]


def results(function, activation, leaves, dy, **options):
    """Return y and the gradients."""
    leaves = [it.detach().requires_grad_() for it in leaves]
    y = function(activation, *leaves, **options)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def assert_contract(name, activation, leaves, dy, **options):
    """Assert SEMANTICS' error contract on y and the gradients."""
    block, wide = BLOCKS[name], [it.double().cpu() for it in leaves]
    wanted = results(block.torchs, activation, wide, dy.double().cpu())
    theirs = results(block.torchs, activation, leaves, dy)
    ours = results(block.ours, activation, leaves, dy, **options)
    x, *values = wide
    parameters = Parameters(*map(dict(zip(block.names, values, strict=True)).get, Parameters._fields))
    found = exact.block(Kind(name, activation, "gated" in name, "stacked" in name), x, parameters, dy.double().cpu())
    sizes = [found.y, found.dx, *(getattr(found.gradients, it) for it in block.names)]
    is_one_layer = name.startswith("linear_act")
    independent = dy.numel() if is_one_layer else len(dy)
    exact.assert_as_near(("y", "x", *block.names), ours, theirs, wanted, sizes, independent, is_one_layer)
