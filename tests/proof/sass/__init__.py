"""Runs machine code of NVIDIA's chips on the CPU, one block of it, and counts what it does.

The launch is a real one: the arguments that an op gives its kernel, and the tensors that they point to. So what is
counted is what is executed, on the path that this dtype takes, whatever else the kernel can do. A test holds what the
warp stores against the op's reference, bit for bit.
"""

from tests.proof.sass import bits, control, conversions, floats, integers

__all__ = ["bits", "control", "conversions", "floats", "integers"]  # by being imported they say what instructions mean
