"""Kernels touch their tensors and nothing else: each tensor lies between a pattern and a page that nobody may access.

A touch of the page ends the process, so each target gets its own process:
python -m tests.proof.test_guard_pages cpu-cuda
"""

import ctypes
import itertools
import mmap
import os
import subprocess
import sys
from functools import partial

import pytest
import torch

from mpkernels.ops import _registry, grad_stats, overflow_, unscale_, update_scale_
from mpkernels.ops.linear.activations import ACTIVATIONS
from mpkernels.ops.linear.linear_act import _linear_act, _linear_act_backward
from mpkernels.ops.linear.linear_dact import _linear_dact
from mpkernels.ops.linear.linear_gated import _linear_dgated, _linear_gated
from tests import ROOT
from tests.hard_grads import DTYPES, random_grads
from tests.linear_cases import before_a_layer, layer, saved_of
from tests.ops.step.rules_table import RULES, WEIGHTS, Rows
from tests.targets import TARGETS

pytestmark = pytest.mark.begins_first
SIZES = (0, 1, 7, 33, 1023, 1024, 1025, 2048, 4104)  # of 1024 fp32 or 2048 16-bit numbers, each thread takes a pack
SIZES_INTERPRETED = (1025,)  # whole blocks, and one that needs its mask
LENGTH_INTERPRETED = 8 * 64 + 1  # of a matrix's side: a whole group of tiles, and one that needs its mask
PATTERN = 0xFF  # NaN in every format
PLACES = {
    "at the begin": lambda room: 0,
    "at the end": lambda room: room,
    "at the last aligned place": lambda room: room // 16 * 16,
}
libc = ctypes.CDLL(None, use_errno=True)


class Fence:
    """A callable that copies a tensor to memory right beside a guard page."""

    def __init__(self, place):
        self.place, self.margins = place, []

    def __call__(self, tensor):
        size, page = tensor.nbytes, mmap.PAGESIZE
        pages = max(1, -(-size // page))
        memory = mmap.mmap(-1, (pages + 2) * page)
        within = torch.frombuffer(memory, dtype=torch.uint8, count=pages * page, offset=page).fill_(PATTERN)
        for guard in (within.data_ptr() - page, within.data_ptr() + pages * page):
            if libc.mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(page), 0) != 0:  # 0: PROT_NONE
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        first = PLACES[self.place](pages * page - size)
        self.margins += within[:first], within[first + size :]
        return within[first : first + size].view(tensor.dtype).view(tensor.shape).copy_(tensor)

    def is_intact(self):
        return all((margin == PATTERN).all() for margin in self.margins)


def unscale_fenced(fence, sizes, dtype):
    found_inf = fence(torch.zeros(()))
    unscale_([fence(grad) for grad in random_grads([dtype], sizes)], found_inf, fence(torch.full((), 0.5)))
    assert found_inf.item() == 0.0


def grad_stats_fenced(fence, sizes, dtype):
    assert grad_stats([fence(grad) for grad in random_grads([dtype], sizes)]).found_inf.item() == 0.0


def step_fenced(line, fence, sizes, weight, grad, state):
    rows = Rows(line, sizes, [weight], [grad], [state])
    rows.lists = {name: [fence(tensor) for tensor in tensors] for name, tensors in rows.lists.items()}
    rows.step([fence(tensor) for tensor in rows.grads(seed=0)], grad_scale=2.0, max_norm=1.0)
    assert all(tensor.isfinite().all() for tensors in rows.lists.values() for tensor in tensors)


def update_scale_fenced(fence, sizes, found_inf):
    scale, tracker, overflows = fence(torch.ones(())), fence(COUNT.clone()), fence(COUNT.repeat(2))
    update_scale_(scale, tracker, fence(torch.tensor(found_inf)), 2.0, 0.5, 1, overflows)
    assert scale.item() == (0.5 if found_inf else 2.0)


def shapes(length):
    """Return rows, features and outputs: all odd, one as long as several blocks, one of them 0, all multiples of 8."""
    return (5, 33, 31), (1, 8, length), (length, 8, 1), (0, 3, 5), (5, 0, 3), (8, 16, 24)


def linear_act_fenced(fence, length, dtype, activation):
    for rows, features, outputs in shapes(length):
        x, weight, bias, dy = layer(rows, features, outputs, dtype)
        arguments = fence(x), fence(weight), fence(bias)
        y, z = _linear_act(*arguments, activation, True)
        saved = {"z": z, "y": y, "": z}[ACTIVATIONS[activation].saves]
        gradients = _linear_act_backward(fence(dy), *arguments[:2], fence(saved), activation, torch.float32, dtype)
        assert all(it.isfinite().all() for it in (y, *gradients))


def linear_dact_fenced(fence, length, dtype, activation):
    for shape in shapes(length):
        dy, weight, z = before_a_layer(*shape, dtype)
        arguments = fence(dy), fence(weight), fence(saved_of(z, activation)), activation, torch.float32
        assert all(it.isfinite().all() for it in _linear_dact(*arguments, True))


def linear_gated_fenced(fence, length, dtype, activation):
    for rows, features, outputs in shapes(length):
        x, weight, bias, _ = layer(rows, features, 2 * outputs, dtype)
        gate, up = (fence(it) for it in weight.chunk(2))
        h, z = _linear_gated(fence(x), gate, up, fence(bias[:outputs]), None, activation, True)
        elementwise = _linear_dgated(fence(h), None, fence(z), activation, False)
        dy, weight, _ = before_a_layer(rows, 7, outputs, dtype)
        gradients = _linear_dgated(fence(dy), fence(weight), fence(z), activation, True)
        assert all(it.isfinite().all() for it in (h, z, *elementwise, *gradients))


def overflow_fenced(fence, sizes, dtype):
    grads = [fence(grad) for grad in random_grads([dtype], sizes)]
    report = fence(torch.zeros(1 + len(grads), 6, dtype=torch.float64))
    overflow_(grads, fence(torch.ones(())), fence(torch.full((), 2.0)), False, report)
    assert report[:, :3].tolist() == [[1.0, 2.0, 2.0], *([grad.numel(), 0.0, 0.0] for grad in grads)]


COUNT = torch.zeros((), dtype=torch.int32)
F32, F16, B16, F64 = DTYPES
STEP_CASES = [
    *zip((*WEIGHTS, (F64, "none")), (F16, B16, F32, B16, F16, F64), (F32, B16, torch.int8, B16, F32, F64), strict=True)
]
LINEAR_CASES = [*itertools.product((F16, B16, F32), ("gelu", "relu", "none"))]
CASES = {
    "unscale_": (unscale_fenced, [(dtype,) for dtype in DTYPES]),
    "grad_stats": (grad_stats_fenced, [(dtype,) for dtype in DTYPES]),
    "overflow_": (overflow_fenced, [(dtype,) for dtype in DTYPES]),
    **{line.ops.rule.op: (partial(step_fenced, line), STEP_CASES) for line in RULES.values()},
    "update_scale_": (update_scale_fenced, [(0.0,), (1.0,)]),
    "linear_act": (linear_act_fenced, LINEAR_CASES[::2]),
    "linear_act_backward": (linear_act_fenced, LINEAR_CASES[1::2]),
    "linear_dact": (linear_dact_fenced, LINEAR_CASES),
    "linear_gated": (linear_gated_fenced, LINEAR_CASES[::2]),
    "linear_dgated": (linear_gated_fenced, LINEAR_CASES[1::2]),
}


def run_fenced(target):
    assert target.why_missing() is None
    sizes, length = (SIZES_INTERPRETED, LENGTH_INTERPRETED) if target.is_interpreted else (SIZES, SIZES[-1])
    with target.active():
        for name, (run, cases) in CASES.items():
            for case, place in itertools.product(cases, PLACES):
                print(name, *case, place, flush=True)
                fence = Fence(place)
                run(fence, length if name.startswith("linear") else sizes, *case)
                assert fence.is_intact()


def test_every_op_is_fenced():
    assert CASES.keys() == _registry._ops.keys()


@pytest.mark.exhaustive
@pytest.mark.kernels("native", "cuda", "triton")
def test_nothing_beside_a_tensor_is_touched(target):
    if target.device.type != "cpu":
        pytest.skip("guards the CPU's memory")
    command = [sys.executable, "-m", __name__, str(target)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    case = done.stdout.strip().rpartition("\n")[2]
    assert done.returncode == 0, f"{case}: exit status {done.returncode}\n{done.stderr}"
    assert case, "nothing has run"


if __name__ == "__main__":
    from tests import conftest  # noqa: F401  mends the interpreter as in the tests' own process

    run_fenced(TARGETS[sys.argv[1]])
