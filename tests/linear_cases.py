"""A linear layer and the activation after or before it, as torch has them: the oracle, in fp64, and the rival,
in the dtype at hand."""

from functools import partial

import torch
from torch.nn import functional

from mpkernels.ops import linear_dact
from mpkernels.ops.linear.activations import ACTIVATIONS

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
NAMES = ("y", "dx", "dweight", "dbias")


def torchs(x, weight, bias, activation):
    return TORCH[activation](functional.linear(x, weight, bias))


def layer(rows, features, outputs, dtype, device="cpu", seed=0, bias=True):
    """x, weight, bias or None, dy: of a size that leaves z around 1."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (rows, features), (outputs, features), (outputs,), (rows, outputs)
    x, weight, b, dy = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    weight = weight / max(features, 1) ** 0.5
    return [each.to(dtype).to(device) for each in (x, weight)] + [
        b.to(dtype).to(device) if bias else None,
        dy.to(dtype).to(device),
    ]


def integers(*shape, dtype=torch.bfloat16, device="cpu", seed=0):
    """Small enough that a sum of 64 products is exact, in whichever order, in 16 bits too."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randint(-2, 3, shape, generator=generator).to(device, dtype)


def results(function, x, weight, bias, dy, activation):
    """y and the gradients of x, weight and bias, where there is one."""
    leaves = [each.detach().requires_grad_() for each in (x, weight, bias) if each is not None]
    y = function(*leaves, *([None] if bias is None else []), activation)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def with_gaps(tensor):
    """The same, but each second element of its memory is NaN."""
    return torch.stack((tensor, torch.full_like(tensor, torch.nan)), -1).flatten(-2)[..., ::2]


def transposed(matrix):
    """The same, but its columns lie one after the other."""
    return matrix.t().contiguous().t()


def relative_error(got, want):
    want = want.double().cpu()
    error, norm = torch.linalg.vector_norm(got.double().cpu() - want).item(), torch.linalg.vector_norm(want).item()
    return error / norm if norm else error


def assert_contract(function, x, weight, bias, dy, activation):
    """SEMANTICS' error contract: as near to fp64 as torch is in the same dtype, but for 2 % and luck in rounding."""
    arguments = x, weight, bias, dy
    wide = [None if it is None else it.double().cpu() for it in arguments]
    exact = results(torchs, *wide, activation)
    theirs = results(torchs, *(None if it is None else it.cpu() for it in arguments), activation)
    ours = results(function, *arguments, activation)
    largest = largest_terms(*wide, activation)
    assert_as_near(NAMES, ours, exact, theirs, largest)


def assert_as_near(names, ours, exact, theirs, largest):
    """``largest``: what they would be if nothing cancelled."""
    eps = torch.finfo(ours[0].dtype).eps
    is_wide = ours[0].dtype == torch.float32
    floor = 2 * eps if is_wide else eps / 8
    for name, want, rival, got, terms in zip(names, exact, theirs, ours, largest, strict=False):
        assert got.shape == want.shape, name
        assert got.dtype == rival.dtype, name
        luck = floor
        if min(got.numel(), ours[0].numel()) < 64:  # each has a say: torch may be lucky with it, or a sum may cancel
            luck = (8 if is_wide else 1) * eps * relative_error(terms + want, want)
        bound = 1.02 * relative_error(rival, want) + luck
        assert relative_error(got, want) <= bound, f"{name}: {relative_error(got, want):.3g} > {bound:.3g}"


def largest_terms(x, weight, bias, dy, activation):
    """What y, dx, dweight and dbias would be if nothing cancelled: no terms of a sum, nor what a slope is made of."""
    z = functional.linear(x, weight, bias)
    reach = functional.linear(x.abs(), weight.abs(), None if bias is None else bias.abs())
    dz = dy.abs() * terms_of_slope(z, reach, activation)
    return reach, dz @ weight.abs(), dz.t() @ x.abs(), dz.sum(0)


def terms_of_slope(z, reach, activation):
    """Where z is off by some eps of ``reach``."""
    z = z.detach().requires_grad_()
    y = TORCH[activation](z)
    (slope,) = torch.autograd.grad(y.sum(), z, create_graph=True)
    bend = torch.autograd.grad(slope.sum(), z)[0] if slope.requires_grad else torch.zeros_like(z)
    of_y = 2 * y.square() if activation in ("sigmoid", "tanh") else 0  # whose slopes are made of a rounded y
    return (slope.abs() + bend.abs() * reach + of_y).detach()


def before_a_layer(rows, outputs, columns, dtype, device="cpu", seed=0):
    """dy and weight of a layer, and z of the activation before it."""
    z, weight, _, dy = layer(rows, columns, outputs, dtype, device, seed)
    return dy, weight, z


def saved_of(z, activation):
    return {"z": z, "y": TORCH[activation](z), "": z.new_empty(0)}[ACTIVATIONS[activation].saves]


def torchs_dact(dy, weight, z, activation):
    z = z.detach().requires_grad_()
    (dz,) = torch.autograd.grad(TORCH[activation](z), z, dy @ weight)
    return dz, dz.sum(0)


def assert_contract_of_dact(dy, weight, z, activation, with_dbias=True):
    wide, narrow = ([it.to(dtype).cpu() for it in (dy, weight, z)] for dtype in (torch.float64, z.dtype))
    ours = linear_dact(dy, weight, saved_of(z, activation), activation, z.dtype if with_dbias else None)
    terms = (wide[0].abs() @ wide[1].abs()) * terms_of_slope(wide[2], wide[2].abs(), activation)
    rounded, exact = torchs_dact(*narrow, activation), torchs_dact(*wide, activation)
    assert_as_near(("dz", "dbias")[: 1 + with_dbias], ours, exact, rounded, (terms, terms.sum(0)))
