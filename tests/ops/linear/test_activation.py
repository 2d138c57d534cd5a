"""The activations' formulas, in C++ with every instruction set that this machine has; their slopes in every kernel."""

import subprocess
from pathlib import Path

import pytest
import torch

from mpkernels.functional import linear_act
from mpkernels.ops import linear_dact
from mpkernels.ops.linear.activations import ACTIVATIONS
from tests.linear_cases import TORCH, saved_of
from tests.ops.test_isa import CSRC, ISAS, X86
from tests.proof import instructions
from tests.proof.emulation import find_compiler

SOURCE, SOURCE16 = (Path(__file__).with_name(name) for name in ("activation.cpp", "activation16.cpp"))

# Relative errors in eps. Without an fma z^2 is rounded, and exp(-z^2 / 2) has this error times z^2.
GELU_BOUND = {"baseline": 60}
CPU = {"GELU": 4, "SIGMOID": 3, "TANH": 3}

# A GPU's ex2 and rcp err by 2 and 1, where a CPU's polynomial and division err by 1 and 1/2. A small sigmoid is e times
# an inverse: 2 and a rounding, 1 and a rounding of 1 + e, and a product's. GELU's tail has the same factors. tanh is
# (1 - e) / (1 + e) with e <= 1/3: an e that is off by 2.5 counts 1.3 above and 0.6 below, beside 1 and four roundings.
GPU = {"GELU": CPU["GELU"] + 1 + 0.5, "SIGMOID": 2 + 0.5 + 1 + 0.5 + 0.5, "TANH": 1.3 + 0.6 + 1 + 4 * 0.5}


def macros(bounds):
    return [f"-DMPK_{name}_BOUND={bound}" for name, bound in bounds.items()]


@pytest.mark.parametrize("isa", ISAS)
def test_every_activation_is_as_near_to_fp64_as_fp32_can_be(tmp_path, isa):
    program = tmp_path / "activation"
    command = [*find_compiler(), "-std=c++17", "-O2", "-ffp-contract=off", "-fno-math-errno", "-Wno-psabi"]
    command += ["-DMPK_X86"] * X86 + ISAS[isa] + [f"-DMPK_ISA={isa}"]
    command += macros(CPU | {"GELU": GELU_BOUND.get(isa, CPU["GELU"])})
    subprocess.run([*command, f"-I{CSRC}", str(SOURCE), "-o", str(program)], check=True)
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    if done.returncode < 0:
        pytest.skip(f"this machine has no {isa}")
    assert done.returncode == 0, done.stdout


@pytest.mark.exhaustive
def test_every_activation_is_near_to_fp64_though_a_gpus_instructions_err(tmp_path):
    """The GPU's branch of math.h runs on the CPU. Its instructions err as far as PTX allows, in each direction."""
    program = instructions.build(SOURCE, tmp_path, *macros(GPU))
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.exhaustive
def test_every_16_bit_number_is_rounded_right_though_a_gpus_instructions_err(tmp_path):
    """At most 20 of fp16's results aren't the nearest, by 0.002 units in the last place; slopes err by 0.75 at most."""
    done = subprocess.run([instructions.build(SOURCE16, tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def slopes(function, z):
    """Return the first and the second derivative."""
    z = z.detach().requires_grad_()
    (first,) = torch.autograd.grad(function(z).sum(), z)
    (again,) = torch.autograd.grad(function(z).sum(), z, create_graph=True)
    second = torch.autograd.grad(again.sum(), z)[0] if again.requires_grad else torch.zeros_like(z)
    return first, second


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_slopes_are_as_near_to_fp64_as_fp32_can_be_at_every_point(target, activation):
    """A saturated sigmoid is off by eps / 2, which the second derivative of tanh-GELU multiplies by up to 7; the rest
    is a few roundings of numbers around 1."""
    points = 513 if target.is_interpreted else 8193
    z = torch.cat([torch.linspace(-12, 12, points), torch.logspace(-20, 0, 201), -torch.logspace(-20, 0, 201)])
    one = torch.ones(1, 1, device=target.device)
    rows, bound = z.to(target.device).unsqueeze(1), 6 * torch.finfo(torch.float32).eps
    first, second = slopes(lambda z: linear_act(z, one, None, activation), rows)
    from_dact, _ = linear_dact(torch.ones_like(rows), one, saved_of(rows, activation), activation, None)
    want_first, want_second = slopes(TORCH[activation], z.double().unsqueeze(1))
    for got, want in ((first, want_first), (from_dact, want_first), (second, want_second)):
        error = (got.cpu().double() - want).abs()
        assert error.max() <= bound, f"{error.max():.3g} at {z[error.argmax()]:.9g}"


def test_the_tail_of_gelu_loses_nothing_to_cancellation(target):
    """A rounding of z^2 / 2 changes its exponential by as many eps as z^2 / 2 is large; the rest is some roundings."""
    z = torch.linspace(-10, 0, 101)[:-1]
    rows, one = z.to(target.device).unsqueeze(1), torch.ones(1, 1, device=target.device)
    y, eps = linear_act(rows, one, None, "gelu").cpu().double().flatten(), torch.finfo(torch.float32).eps
    want = z.double() * torch.erfc(z.double() * -(0.5**0.5)) / 2  # torch's own gelu cancels
    assert ((y - want).abs() <= (z * z + 8) * eps * want.abs()).all()
