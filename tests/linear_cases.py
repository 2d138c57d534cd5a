"""torch's linear layer with an activation after or before it: in fp64 as the oracle, in the tested dtype as the
rival."""

from functools import partial

import torch
from torch.nn import functional

from mpkernels.ops import linear_dact
from mpkernels.ops.linear.activations import ACTIVATIONS
from tests import exact

TORCH = {
    "none": lambda z: z,
    "relu": functional.relu,
    "relu2": lambda z: functional.relu(z).square(),
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "silu": functional.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


def torchs(x, weight, bias, activation):
    return TORCH[activation](functional.linear(x, weight, bias))


def layer(rows, features, outputs, dtype, device="cpu", seed=0, bias=True):
    """Return x, weight, bias or None, and dy, of a size that leaves z around 1."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (rows, features), (outputs, features), (outputs,), (rows, outputs)
    x, weight, b, dy = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    weight = weight / max(features, 1) ** 0.5
    x, weight, b, dy = (tensor.to(dtype).to(device) for tensor in (x, weight, b, dy))
    return [x, weight, b if bias else None, dy]


def integers(*shape, dtype=torch.bfloat16, device="cpu", seed=0):
    """Return integers so small that a sum of 64 products is exact in any order, even in 16 bits."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randint(-2, 3, shape, generator=generator).to(device, dtype)


def results(function, x, weight, bias, dy, activation):
    """Return y and the gradients of x, weight and, if there is one, bias."""
    leaves = [leaf.detach().requires_grad_() for leaf in (x, weight, bias) if leaf is not None]
    y = function(*leaves, *([None] if bias is None else []), activation)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def with_gaps(tensor):
    """Return the same numbers in memory where NaN stands between each two."""
    return torch.stack((tensor, torch.full_like(tensor, torch.nan)), -1).flatten(-2)[..., ::2]


def transposed(matrix):
    """Return the same matrix, stored by columns."""
    return matrix.t().contiguous().t()


def relative_error(got, want):
    want = want.double().cpu()
    error, norm = torch.linalg.vector_norm(got.double().cpu() - want).item(), torch.linalg.vector_norm(want).item()
    return error / norm if norm else error


def before_a_layer(rows, outputs, columns, dtype, device="cpu", seed=0):
    """Return dy and weight of a layer, and z of the activation before it."""
    z, weight, _, dy = layer(rows, columns, outputs, dtype, device, seed)
    return dy, weight, z


def saved_of(z, activation):
    return {"z": z, "y": TORCH[activation](z), "": z.new_empty(0)}[ACTIVATIONS[activation].saves]


def torchs_dact(dy, weight, z, activation):
    z = z.detach().requires_grad_()
    (dz,) = torch.autograd.grad(TORCH[activation](z), z, dy @ weight)
    return dz, dz.sum(0)


def assert_contract_of_dact(dy, weight, z, activation):
    wide, narrow = ([it.to(dtype).cpu() for it in (dy, weight, z)] for dtype in (torch.float64, z.dtype))
    ours = linear_dact(dy, weight, saved_of(z, activation), activation, z.dtype)
    product = exact.product(exact.given(wide[0]), exact.given(wide[1]))
    dz = exact.times(product, exact.activated(activation, exact.given(wide[2]))[1])
    wanted, theirs = (torchs_dact(*tensors, activation) for tensors in (wide, narrow))
    sizes = dz, exact.summed(dz)
    exact.assert_as_near(("dz", "dbias"), ours, theirs, wanted, sizes, dz.value.numel(), is_one_layer=True)
