"""memory_report and compare_memory count what a calculation by hand says."""

import copy
import re
from functools import partial

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import mpkernels
from mpkernels.amp import to_mixed
from mpkernels.linear import cast_cache
from mpkernels.nn import LinearAct
from mpkernels.ops.linear import activations
from mpkernels.ops.linear.activations import ACTIVATIONS
from mpkernels.optim import AdamW
from tests.networks import B16

IN, OUT, ROWS = 24, 40, 6
WEIGHTS = IN * OUT + OUT  # weight and bias
INPUTS = torch.ones(ROWS, IN)


def model(kind=nn.Linear):
    """Return a layer and a norm, whose sizes differ, so that each can be told from the other."""
    torch.manual_seed(0)
    return nn.Sequential(kind(IN, OUT), nn.BatchNorm1d(OUT))


def loss_of(model, inputs=INPUTS):
    return model(inputs).float().sum()


def half_loss_of(model, inputs=INPUTS):
    with torch.autocast("cpu", dtype=B16):
        return loss_of(model, inputs)


NORM, STATS = 2 * OUT, 4 * 2 * OUT + 8


@pytest.mark.parametrize(
    ("make", "weight", "masters", "moments"),
    [
        (lambda m: torch.optim.AdamW(m.parameters()), 4, 0, 8 * (WEIGHTS + NORM) + 4 * 4),
        (lambda m: torch.optim.SGD(m.parameters(), momentum=0.9), 4, 0, 4 * (WEIGHTS + NORM)),
        (lambda m: torch.optim.SGD(m.parameters()), 4, 0, 0),
        (lambda m: AdamW(m.parameters()), 4, 0, 8 * (WEIGHTS + NORM) + 4 * 4),
        (lambda m: AdamW(to_mixed(m).parameters()), 2, 2 * WEIGHTS, 8 * (WEIGHTS + NORM) + 4 * 4),
        (lambda m: AdamW(to_mixed(m).parameters(), master="fp32"), 2, 4 * WEIGHTS, 8 * (WEIGHTS + NORM) + 4 * 4),
        (lambda m: AdamW(to_mixed(m).parameters(), state_dtype=B16), 2, 2 * WEIGHTS, 4 * (WEIGHTS + NORM) + 4 * 4),
    ],
)
def test_what_it_predicts_before_a_step_is_there_after_it(make, weight, masters, moments):
    net = model()
    optimizer = make(net)
    report = mpkernels.memory_report(net, optimizer)
    held = weight * WEIGHTS + 4 * NORM
    expected = {"parameters": held, "buffers": STATS, "gradients": held, "masters": masters, "moments": moments}
    assert report.predicted == expected | {"cast cache": None, "activations": None}
    before = {"gradients": 0, "masters": 0, "moments": 0}
    assert report.measured == expected | before
    totals = re.findall(r"^total +([\d.]+) MiB", str(report), re.MULTILINE)
    assert totals == [f"{sum(expected.values()) / 2**20:.2f}"]
    loss_of(net).backward()
    optimizer.step()
    after = mpkernels.memory_report(net, optimizer)
    assert after.predicted == report.predicted
    assert after.measured == expected


def test_activations_and_casts_are_counted():
    """A linear layer saves its input, the norm saves its input and two statistics. autocast casts weight, bias and
    input; the cast input counts as an activation."""
    wide = mpkernels.memory_report(model(), loss=loss_of).predicted
    assert (wide["cast cache"], wide["activations"]) == (0, 4 * ROWS * (IN + OUT) + 2 * 4 * OUT)
    half = mpkernels.memory_report(model(), loss=half_loss_of).predicted
    assert (half["cast cache"], half["activations"]) == (2 * WEIGHTS, 2 * ROWS * (IN + OUT) + 2 * 4 * OUT)
    inputs = INPUTS.clone().requires_grad_()  # for its grad, the cast weight is saved; it still is a cast
    assert mpkernels.memory_report(model(), loss=lambda net: half_loss_of(net, inputs)).predicted == half
    mixed = mpkernels.memory_report(to_mixed(model()), loss=loss_of).predicted
    assert (mixed["cast cache"], mixed["activations"]) == (0, half["activations"])


def test_a_model_on_the_meta_device_is_reported_without_a_forward():
    net, twin = model().to("meta"), model()
    report = mpkernels.memory_report(net, AdamW(net.parameters()))
    assert report.predicted == mpkernels.memory_report(twin, AdamW(twin.parameters())).predicted
    assert set(report.measured.values()) == {0}
    for ask in (partial(mpkernels.memory_report, net, None), partial(mpkernels.compare_memory, net)):
        with pytest.raises(ValueError, match=r"must have memory, got 0\.weight on the meta device; .*to_empty"):
            ask(loss_of)


def test_a_checkpointed_layer_saves_less():
    net = nn.Sequential(*(nn.Linear(IN, IN) for _ in range(4)))
    every = mpkernels.memory_report(net, loss=lambda net: net(INPUTS).sum()).predicted["activations"]
    few = mpkernels.memory_report(net, loss=lambda net: checkpoint(net, INPUTS, use_reentrant=False).sum())
    assert every == 4 * 4 * ROWS * IN
    assert few.predicted["activations"] < every


def test_reports_leave_everything_as_it_was():
    net = model()
    optimizer = AdamW(net.parameters())
    loss_of(net).backward()
    before, random = copy.deepcopy((net.state_dict(), [it.grad for it in net.parameters()])), torch.get_rng_state()
    mpkernels.memory_report(net, optimizer, lambda net: loss_of(net) + torch.rand(()))
    mpkernels.compare_memory(net, lambda net: loss_of(net) + torch.rand(()), "mixed_float16")
    assert_close((net.state_dict(), [it.grad for it in net.parameters()]), before, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), random)
    assert not optimizer.state


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, lambda params: torch.optim.LBFGS(params)])
def test_moments_of_an_optimizer_that_cannot_predict_them_are_unknown(kind):
    net = model()
    report = mpkernels.memory_report(net, kind(net.parameters()))
    assert report.predicted["moments"] is None
    assert report.measured["moments"] == 0
    assert re.search(r"^moments +- +0.00 MiB$", str(report), re.MULTILINE)


def test_tied_weights_count_once():
    net = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    net[1].weight = net[0].weight
    assert mpkernels.memory_report(net).predicted["parameters"] == 4 * 64


def test_memory_that_two_functions_save_counts_once():
    """exp saves its result, and the next layer saves a view of it."""
    net = nn.ModuleList([nn.Linear(IN, OUT), nn.Linear(OUT, 1)])
    report = mpkernels.memory_report(net, loss=lambda net: net[1](net[0](INPUTS).exp().view(-1, OUT)).sum())
    assert report.predicted["activations"] == 4 * ROWS * (IN + OUT)


def test_the_table_has_a_row_for_each_kind_of_memory():
    lines = str(mpkernels.memory_report(model(), loss=loss_of)).splitlines()
    assert lines[0].split() == ["predicted", "measured"]
    assert [line.split("  ")[0] for line in lines[1:8]] == [
        *("parameters", "buffers", "gradients", "masters", "moments", "cast cache", "activations")
    ]
    assert lines[8].startswith("total")
    assert lines[9].startswith("resident process ")


def test_compare_memory_shows_three_ways_beside_each_other():
    comparison = mpkernels.compare_memory(model(), loss_of)
    rows = {way: report.predicted for way, report in comparison.reports.items()}
    assert list(rows) == ["fp32", "torch.amp", "mpkernels"]
    assert [row["parameters"] - 4 * NORM for row in rows.values()] == [4 * WEIGHTS, 4 * WEIGHTS, 2 * WEIGHTS]
    assert [row["masters"] for row in rows.values()] == [0, 0, 2 * WEIGHTS]
    assert [row["cast cache"] for row in rows.values()] == [0, 2 * WEIGHTS, 0]
    assert all(row["activations"] > 0 for row in rows.values())
    assert str(comparison).splitlines()[0].split() == ["fp32", "torch.amp", "mpkernels"]
    assert str(comparison).splitlines()[-1].startswith("total ")
    with pytest.raises(ValueError, match=r"^to_mixed: dtype must be .*, got torch\.float32$"):
        mpkernels.compare_memory(model(), loss_of, "float32")
    with pytest.raises(ValueError, match="model must have parameters to train, got ReLU"):
        mpkernels.compare_memory(nn.ReLU(), loss_of)


@pytest.mark.parametrize("dtype", [None, B16, torch.float16], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_linear_act_saves_as_much_as_torch(target, activation, dtype):
    """docs/linear_act.md: its input, the weight, and one more tensor if there is an activation."""

    def loss(net):
        with torch.autocast(target.device.type, dtype=dtype or B16, enabled=dtype is not None):
            y = net(INPUTS.to(target.device))
            return (y if isinstance(net, LinearAct) else activations.AFRESH[activation](y)).float().sum()

    ours, theirs = (
        mpkernels.memory_report(net.to(target.device), loss=loss).predicted["activations"]
        for net in (LinearAct(IN, OUT, activation=activation), nn.Linear(IN, OUT))
    )
    assert ours == theirs == (dtype or torch.float32).itemsize * ROWS * (IN + OUT * (activation != "none"))


AUTOCAST = partial(torch.autocast, "cpu", dtype=B16)


@pytest.mark.parametrize(
    ("kind", "keeps_casts"), [(nn.Linear, AUTOCAST), (LinearAct, AUTOCAST), (LinearAct, cast_cache.one_step)]
)
def test_a_cast_that_an_earlier_forward_has_left_counts_as_a_cast(kind, keeps_casts):
    net, reports = model(kind), []
    with mpkernels.backend("reference"), keeps_casts():
        for _ in range(2):
            reports.append(mpkernels.memory_report(net, loss=half_loss_of).predicted)
            half_loss_of(net)
    assert reports[0] == reports[1]
    assert reports[0]["cast cache"] == 2 * WEIGHTS
