"""Muon's rule in Triton, equal to muon.py to the bit: tests/ops/step/test_rules_same_bits.py compares them."""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator"

from functools import partial

import triton
import triton.language as tl

from mpkernels.ops._registry import implement
from mpkernels.ops.step.launch_kernel import launch
from mpkernels.ops.step.rules.muon import MUON, muon_


@triton.jit
def scalars(hyperparameters, step):
    momentum, nesterov = hyperparameters
    return 1 - momentum, nesterov


@triton.jit
def step(update, grad, states, _, scalars):
    share, nesterov = scalars
    buffer = states[0] + (grad - states[0]) * share
    return tl.where(nesterov != 0, buffer + (grad - buffer) * share, buffer), (buffer,)


implement(muon_.step)(partial(launch, MUON, scalars, step))
