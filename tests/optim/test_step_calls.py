"""Counts our functions that a steady step enters, and their files: the code that a reader of a step must follow."""

import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch

import mpkernels
from mpkernels.amp import GradScaler
from mpkernels.optim import AdamW
from tests.networks import B16

pytestmark = pytest.mark.exhaustive
ROOT = Path(mpkernels.__file__).parent


def entered(run):
    """Return the code of each Python function of ours that ``run`` enters. Comprehensions and generator expressions
    count as parts of their function: Python 3.12 makes no calls for the former."""
    found = set()

    def note(frame, event, argument):
        code = frame.f_code
        if event == "call" and not code.co_name.startswith("<") and Path(code.co_filename).is_relative_to(ROOT):
            found.add(code)

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def steady_step(kind):
    """Return the names of the functions that a step under this kind of scaler enters."""
    scaler = kind("cpu")
    params = [torch.nn.Parameter(torch.randn(10).to(B16)) for _ in range(20)]
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer = AdamW(params, max_norm=1.0)
    for _ in range(3):
        scaler.scale(torch.ones(()))
        found = entered(lambda: scaler.step(optimizer))
        scaler.update()
    return sorted(f"{Path(it.co_filename).relative_to(ROOT)}: {it.co_qualname}" for it in found)


def test_a_steady_step_enters_few_functions_in_few_files():
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as new:  # a process without step hooks
        for kind, functions, files in ((torch.amp.GradScaler, 29, 10), (GradScaler, 33, 14)):
            names = new.submit(steady_step, kind).result()
            entered_files = {name.partition(":")[0] for name in names}
            text = f"{kind}: {len(names)} in {len(entered_files)}\n" + "\n".join(names)
            assert (len(names) <= functions, len(entered_files) <= files) == (True, True), text
