"""Gated layers and MLPs, ours and as torch has them: the oracle in fp64, and the rival in the dtype at hand."""

from typing import NamedTuple

import torch
from torch.nn.functional import linear

from mpkernels.functional import gated_linear, gated_mlp, mlp
from mpkernels.ops.linear.kind import Kind, Parameters
from tests import exact
from tests.linear_cases import TORCH, relative_error


class Block(NamedTuple):
    """A function of x and its parameters, which come in one order for ours and for torch's."""

    ours: object
    torchs: object
    shapes: object  # of the parameters, for K, H, N
    bytes_saved: int  # of each hidden feature in 16 bits
    names: tuple[str, ...]  # of the parameters, as the package has them


def _stacked(x, weight, bias):
    return linear(x, weight, bias).chunk(2, -1)


BLOCKS = {
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
MLPS = {name: it for name, it in BLOCKS.items() if "mlp" in name}


def arguments(name, dtype, sizes=(6, 8, 10, 7), device="cpu", seed=0):
    """x, the parameters, and dy: of a size that leaves z and h around 1."""
    generator = torch.Generator().manual_seed(seed)
    rows, inputs, hidden, outputs = sizes
    last = outputs if "mlp" in name else hidden
    shapes = [(rows, inputs), *BLOCKS[name].shapes(inputs, hidden, outputs), (rows, last)]
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    made[1:-1] = [it / max(it.shape[1], 1) ** 0.5 if it.dim() == 2 else it for it in made[1:-1]]
    return [it.to(dtype).to(device) for it in made]


def results(function, activation, leaves, dy, **options):
    """y and the gradients."""
    leaves = [it.detach().requires_grad_() for it in leaves]
    y = function(activation, *leaves, **options)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def sizes(name, activation, leaves, dy):
    """The size that the error of each result is in proportion to."""
    x, *parameters, dy = (it.double().cpu() for it in (*leaves, dy))
    names = BLOCKS[name].names
    own = Parameters(*(dict(zip(names, parameters, strict=True)).get(each) for each in Parameters._fields))
    kind = Kind(name, activation, "gated" in name, "stacked" in name, 0.0, False)
    it = exact.block(kind, x, own, dy)
    return [each.norm() for each in (it.y, it.dx, *(getattr(it.gradients, name) for name in names))]


def assert_contract(name, activation, leaves, dy, **options):
    """SEMANTICS' error contract: as near to fp64 as torch in the same dtype, but for 2 % and a floor. The floor of few
    numbers, and of fp32, is a share of the summands' size, for a sum may cancel."""
    block, dtype, eps = BLOCKS[name], dy.dtype, torch.finfo(dy.dtype).eps
    wanted = results(block.torchs, activation, [it.double().cpu() for it in leaves], dy.double().cpu())
    theirs = [it.cpu() for it in results(block.torchs, activation, leaves, dy)]
    ours = results(block.ours, activation, leaves, dy, **options)
    everything = zip(ours, wanted, theirs, sizes(name, activation, leaves, dy), strict=True)
    for i, (mine, want, rival, size) in enumerate(everything):
        assert (mine.shape, mine.dtype) == (rival.shape, rival.dtype)
        numbers = min(mine.numel(), len(dy))
        if numbers >= 64 and dtype != torch.float32:  # too many for luck, and for all of them to cancel
            bound = 1.02 * relative_error(rival, want) + eps / 8
            assert relative_error(mine, want) <= bound, f"{i}: {relative_error(mine, want):.3g} > {bound:.3g}"
            continue
        off, rivals = (((it.cpu() - want).norm() / size).item() for it in (mine, rival))
        bound = 1.02 * rivals + 2 * eps
        if dtype != torch.float32:  # a single number is rounded three times in a gated MLP, and torch's may be lucky
            bound = 1.02 * rivals + eps / 8 + 2 * (eps + rivals) / max(1, numbers) ** 0.5
        assert off <= bound, f"{i}: {off:.3g} > {bound:.3g}"
