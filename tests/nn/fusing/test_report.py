"""What fuse reports: a table, a sentence, and the bytes that a forward saves."""

import pytest
import torch
from torch import nn

from mpkernels import selector
from mpkernels.nn import fuse, unfuse
from tests.nn.fusing.forms_left_alone import UnknownActivation
from tests.nn.fusing.models import Chain, Mlp, Packed, X


def test_the_report_is_a_table():
    report = fuse(nn.Sequential(Chain(), Chain(), Packed(), UnknownActivation()))
    assert str(report) == (
        "fused  what stood there                                         computed by\n"
        "* (2)  fc2(dropout(act(fc1(x))))                                mlp, gelu\n"
        "2      gate, up = packed(x).chunk(2); fc2(function(gate) * up)  gated_mlp, silu\n"
        "\n"
        "left  what stands there  why\n"
        "3     fc2(act(fc1(x)))   act is no activation that mpkernels knows\n"
        "\n"
        "A table chooses, by device, dtype and size, which of these calls our kernels compute, and which torch; "
        "mpkernels.tune(model, inputs) times both."
    )


def test_a_report_on_nothing_is_a_sentence():
    assert str(fuse(nn.Linear(2, 2))).startswith("Nothing to fuse: ")


def test_saved_bytes_are_counted_plain_and_fused():
    """GPT-2's activation keeps 8 tensors of the hidden size; a lone linear_act keeps one."""

    class Python(Mlp):
        def forward(self, x):
            return self.act(self.fc1(x))

    model = Python()
    report = fuse(model)
    plain, fused = report.saved_bytes(X)
    assert plain == fused == X.nbytes + X.nbytes * 2
    assert report.saved_bytes((X,)) == report.saved_bytes({"x": X}) == (plain, fused)
    assert type(model) is not Python


def test_a_report_on_a_fused_model_counts_its_saved_bytes_too():
    model, rows = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)), torch.ones(16, 8)
    selector.pin("native")
    try:
        wanted = fuse(model).saved_bytes(rows)
        assert wanted.plain > wanted.fused
        assert fuse(model).saved_bytes(rows) == fuse(model, dry_run=True).saved_bytes(rows) == wanted
    finally:
        selector.pin(None)
    unfuse(model)
    assert type(model) is nn.Sequential


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0
        self.register_buffer("sum", torch.zeros(()))

    def forward(self, x):
        self.calls, self.sum = self.calls + 1, self.sum + x.detach().sum()
        return x


@pytest.mark.parametrize("record", [None, torch.jit.script, lambda it: torch.jit.trace(it, X.view(-1, 8))])
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_saved_bytes_changes_nothing(record):
    norm = nn.Sequential(nn.BatchNorm1d(8))
    model = nn.Sequential(record(norm) if record else norm, Counting(), nn.Linear(8, 8), nn.GELU())
    model[2].weight.grad = grad = torch.ones(8, 8)
    before = [it.clone() for it in model.buffers()]
    for dry_run in (True, False):
        fuse(model, dry_run).saved_bytes(X.view(-1, 8))
        torch.testing.assert_close([*model.buffers()], before, rtol=0, atol=0)
        assert model[1].calls == 0
        assert model[2].weight.grad is grad
