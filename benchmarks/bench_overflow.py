"""What it costs to be ready for a report, in a step that isn't skipped; and what overflow_ costs where one is."""

import pytest
import torch

from benchmarks.bench_adamw import parameters
from benchmarks.pairs import Pair
from mpkernels.ops import grad_stats, overflow_
from mpkernels.optim import AdamW


def test_a_step_that_could_report(compare, grads):
    """Beside the same step without a report. No more bytes, no more launches: 1 is what to expect."""
    reporting, silent = (AdamW(parameters(grads, grads[0].dtype), guard=True) for _ in range(2))
    silent.step()
    for table in silent._tables:
        table.report = None
    moved = sum(2 * grad.nbytes + 24 * grad.numel() for grad in grads)
    compare(Pair("adamw_", reporting.step, silent.step, calls=1, moved=moved, variant="beside no report"))


@pytest.mark.settings("100x500k", "1000x5k", "in-cache")
@pytest.mark.parametrize("found", [0.0, 1.0], ids=["not-skipped", "skipped"])
def test_overflow(compare, grads, device, found):
    """Beside one pass of grad_stats, as a measure: nothing of torch's tells as much."""
    report = torch.zeros(1 + len(grads), 6, dtype=torch.float64, device=device)
    found_inf = torch.full((), found, device=device)
    variant = "beside grad_stats, " + ("skipped" if found else "not skipped")
    moved = int(found) * sum(grad.nbytes for grad in grads)

    def ours():
        overflow_(grads, found_inf, None, False, report)

    compare(Pair("overflow_", ours, lambda: grad_stats(grads), calls=1, moved=moved, variant=variant))
