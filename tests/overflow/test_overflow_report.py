"""overflow_report names the grads for which a step was skipped, under every optimizer."""

import json
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mpkernels.amp import GradScaler
from mpkernels.optim import AdamW
from tests.amp.test_grad_scaler import OPTIMIZERS
from tests.networks import B16, F16, network

INF, NAN = math.inf, math.nan
every_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


def params_of(*shapes, dtype=torch.float32, device="cpu"):
    return [torch.nn.Parameter(torch.ones(shape, dtype=dtype, device=device)) for shape in shapes]


def iterate(scaler, *optimizers, bad=()):
    """Take a step, and drop the grads. Unscaled they are 1, except those that ``bad`` sets: parameter, index, value."""
    params = [param for optimizer in optimizers for group in optimizer.param_groups for param in group["params"]]
    scaler.scale(sum(param.abs().sum() for param in params if param.requires_grad)).backward()
    for param, index, value in bad:
        param.grad[index] = value
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    for optimizer in optimizers:
        optimizer.zero_grad()


def culprits(report):
    return [(it.name, it.infs, it.nans, it.first) for it in report.culprits]


@pytest.mark.parametrize(
    ("guard", "wanted"),
    [
        (True, "been skipped"),
        (False, "looked for an inf or NaN; compiled ones, if there were any, have skipped nothing"),
    ],
)
def test_before_the_first_skip_it_says_whether_a_step_has_looked(guard, wanted):
    (param,) = params_of((3,))
    optimizer = AdamW([param], guard=guard)
    param.grad = torch.ones(3)
    optimizer.step()
    assert str(optimizer.overflow_report()) == f"No step has {wanted}."


def test_a_process_alone_gathers_its_own_report():
    (param,) = params_of((3,))
    optimizer = AdamW([param], guard=True)
    param.grad = torch.tensor([1.0, INF, 1.0])
    optimizer.step()
    report = optimizer.overflow_report()
    assert culprits(report.gather()) == culprits(report) != []
    assert [it.rank for it in report.gather().culprits] == [0]


@every_optimizer
def test_the_report_is_on_the_last_skipped_step(target, make):
    first, second, third = params_of((3, 4), (5,), (), device=target.device)
    optimizer, scaler = make([first, second, third]), GradScaler(target.device.type, init_scale=8.0)
    assert not scaler.overflow_report()
    iterate(scaler, optimizer)
    assert not scaler.overflow_report()
    assert str(scaler.overflow_report()) == "No step has been skipped."
    iterate(scaler, optimizer, bad=[(second, slice(1, 3), NAN), (first, (2, 1), -INF), (first, (0, slice(2)), 0.0)])
    report = scaler.overflow_report()
    assert culprits(report) == [("group 0, parameter 1", 0, 2, (1,)), ("group 0, parameter 0", 1, 0, (2, 1))]
    assert [it.shape for it in report.gradients] == [(3, 4), (5,), ()]
    assert [it.largest for it in report.gradients] == [1.0] * 3
    assert [it.zeros for it in report.gradients] == [2 / 12, 0.0, 0.0]
    assert (report.scale, report.zeros, report.skips_in_a_row) == (8.0, 2 / 18, 1)
    iterate(scaler, optimizer)
    assert culprits(scaler.overflow_report()) == culprits(report)  # the report stays until the next skip
    iterate(scaler, optimizer, bad=[(third, (), INF)])
    report = scaler.overflow_report()
    assert culprits(report) == [("group 0, parameter 2", 1, 0, ())]
    assert (report.scale, report.gradients[2].largest) == (4.0, 0.0)


VALUES = st.sampled_from([INF, -INF, NAN, 0.0, -0.0, 3.0, -5.0])


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    shapes=st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), min_size=1, max_size=5),
    data=st.data(),
    unscales=st.booleans(),
)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_report_counts_the_values_of_any_grads(name, shapes, data, unscales):
    params = params_of(*shapes)
    optimizer, scaler = OPTIMIZERS[name](params), GradScaler("cpu", init_scale=4.0)
    scaler.scale(sum(param.abs().sum() for param in params)).backward()  # gives each parameter its own grad
    values = [data.draw(st.lists(VALUES, min_size=it.numel(), max_size=it.numel())) for it in params]
    for param, drawn in zip(params, values, strict=True):
        param.grad.copy_(torch.tensor(drawn).reshape(param.shape))
    if unscales:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    report = scaler.overflow_report()
    all_finite = all(math.isfinite(value) for drawn in values for value in drawn)
    assert bool(report) == (not all_finite)
    if all_finite:
        return
    present = [drawn for drawn in values if drawn]
    assert report.scale == 4.0
    assert [it.infs for it in report.gradients] == [sum(map(math.isinf, drawn)) for drawn in present]
    assert [it.nans for it in report.gradients] == [sum(map(math.isnan, drawn)) for drawn in present]
    assert [it.zeros for it in report.gradients] == [drawn.count(0.0) / len(drawn) for drawn in present]
    finite = [[abs(value) / 4.0 for value in drawn if math.isfinite(value)] for drawn in present]
    assert [it.largest for it in report.gradients] == [max(drawn, default=0.0) for drawn in finite]
    for it, drawn in zip(report.gradients, present, strict=True):
        bad = [i for i, value in enumerate(drawn) if not math.isfinite(value)]
        assert it.first == (tuple(map(int, torch.unravel_index(torch.tensor(bad[0]), it.shape))) if bad else None)


@pytest.mark.parametrize("dtype", [torch.float32, B16, F16, torch.float64], ids=str)
def test_the_guard_makes_the_report_where_no_scaler_looks(target, dtype):
    """A loop with a disabled scaler calls it all the same."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2)).to(target.device, dtype)
    optimizer, scaler = AdamW(model.parameters(), guard=True), GradScaler(target.device.type, enabled=False)
    before = [param.clone() for param in model.parameters()]
    for bad in (False, True, False):
        scaler.scale(model(torch.ones(2, 4, dtype=dtype, device=target.device)).sum()).backward()
        if bad:
            model[1].weight.grad[1, 2] = NAN
            before = [param.clone() for param in model.parameters()]
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        moved = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
        assert any(moved) != bad
    assert optimizer.skipped_steps.item() == 1
    for report in (optimizer.overflow_report(model), scaler.overflow_report(model)):
        assert culprits(report) == [("1.weight", 0, 1, (1, 2))]
        assert (report.scale, report.skips_in_a_row) == (None, None)


def test_parameters_have_the_optimizers_names_or_the_models():
    model = network()
    decayed, others = [], []
    for name, param in model.named_parameters():
        (decayed if param.ndim > 1 else others).append((name, param))
    for make, named in (
        (lambda: AdamW([{"params": decayed}, {"params": others}]), True),
        (lambda: AdamW([{"params": [it for _, it in group]} for group in (decayed, others)]), False),
    ):
        optimizer, scaler = make(), GradScaler("cpu")
        iterate(scaler, optimizer, bad=[(model[0].bias, 0, INF), (model[3].weight, (1, 1), NAN)])
        by_model = [("3.weight", 1), ("0.bias", 1)]
        by_group = by_model[::-1] if named else [("group 1, parameter 0", 1), ("group 0, parameter 1", 1)]
        assert [(it.name, it.infs + it.nans) for it in scaler.overflow_report().culprits] == by_group
        assert [(it.name, it.infs + it.nans) for it in scaler.overflow_report(model).culprits] == by_model
        assert [it.group for it in scaler.overflow_report(model).culprits] == [0, 1]


@every_optimizer
def test_the_report_covers_the_parameters_that_had_grads_in_its_step(make):
    """Later steps, with other parameters, don't change it."""
    first, second, third = params = params_of((2,), (3,), (4,))
    optimizer, scaler = make(params), GradScaler("cpu", init_scale=8.0)
    second.requires_grad_(False)
    iterate(scaler, optimizer, bad=[(third, 3, INF)])
    second.requires_grad_(True)
    for frozen in (first, third, second):
        frozen.requires_grad_(False)
        iterate(scaler, optimizer)
        frozen.requires_grad_(True)
        report = scaler.overflow_report()
        assert culprits(report) == [("group 0, parameter 2", 1, 0, (3,))]
        assert [it.shape for it in report.gradients] == [(2,), (4,)]
    iterate(scaler, optimizer, bad=[(second, 0, NAN)])
    assert culprits(scaler.overflow_report()) == [("group 0, parameter 1", 0, 1, (0,))]
    assert len(scaler.overflow_report().gradients) == 3


@every_optimizer
def test_the_report_covers_the_optimizers_of_the_last_skip(make):
    """The optimizers may step in any order."""
    (one,), (two,) = params_of((2,)), params_of((3,))
    optimizers = first, second = make([one]), make([two])
    scaler = GradScaler("cpu")
    iterate(scaler, first, bad=[(one, 1, INF)])
    iterate(scaler, *optimizers)
    assert [it.shape for it in scaler.overflow_report().culprits] == [(2,)]
    iterate(scaler, *optimizers, bad=[(two, 2, INF)])
    assert [it.shape for it in scaler.overflow_report().gradients] == [(3,)]
    iterate(scaler, first, bad=[(one, 0, NAN)])
    iterate(scaler, second)
    assert [it.shape for it in scaler.overflow_report().gradients] == [(2,)]
    iterate(scaler, *optimizers, bad=[(one, 0, NAN), (two, 0, NAN)])
    assert [it.shape for it in scaler.overflow_report().culprits] == [(3,), (2,)]
    del second, optimizers
    assert [it.shape for it in scaler.overflow_report().culprits][-1:] == [(2,)]


@every_optimizer
def test_grads_that_the_loop_has_unscaled_are_reported_by_their_unscaled_size(make):
    (param,) = params_of((4,))
    optimizer, scaler = make([param]), GradScaler("cpu", init_scale=8.0)
    for unscales, scale in ((True, 8.0), (False, 4.0), (True, 2.0)):
        scaler.scale(param.sum()).backward()
        param.grad[1] = INF
        if unscales:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        report = scaler.overflow_report()
        assert (report.scale, report.gradients[0].largest) == (scale, 1.0)


def test_finite_grads_that_overflow_once_unscaled_have_no_culprit():
    (param,) = params_of((2,))
    optimizer, scaler = AdamW([param]), GradScaler("cpu", init_scale=0.25)
    iterate(scaler, optimizer, bad=[(param, 0, 3e38)])
    report = scaler.overflow_report()
    assert report
    assert report.culprits == []
    assert report.gradients[0].largest == pytest.approx(1.2e39)
    assert "Give the scaler a min_scale." in report.suggestion


class Writer:
    def __init__(self):
        self.scalars = {}

    def add_scalar(self, tag, value, step):
        self.scalars[tag] = value, step


def test_the_report_turns_into_a_dict_and_scalars():
    model = network()
    optimizer, scaler = torch.optim.SGD(model.named_parameters(), lr=0.1), GradScaler("cpu", init_scale=8.0)
    writer = Writer()
    scaler.overflow_report().log_to(writer, 0)
    assert writer.scalars == {}
    assert json.loads(json.dumps(scaler.overflow_report().as_dict()))["skipped"] is False
    iterate(scaler, optimizer, bad=[(model[0].weight, (1, 2), NAN), (model[0].bias, 1, INF)])
    report = scaler.overflow_report()
    report.log_to(writer, 7)
    assert writer.scalars["overflow/gradients"] == (2, 7)
    assert writer.scalars["overflow/scale"] == (8.0, 7)
    assert writer.scalars["overflow/nan/0.weight"] == writer.scalars["overflow/inf/0.bias"] == (1, 7)
    values = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert [(it["name"], it["first"]) for it in values["culprits"]] == [("0.bias", [1]), ("0.weight", [1, 2])]
    assert values["skipped"] is True
    assert values["suggestion"] == report.suggestion


def test_the_table_shows_20_culprits_and_names_the_rest():
    names = [f"{'layer.' * 20}{i}.weight" for i in range(50)]
    params = params_of(*[(2, 3)] * 50)
    optimizer, scaler = torch.optim.SGD(list(zip(names, params, strict=True)), lr=0.1), GradScaler("cpu")
    iterate(scaler, optimizer, bad=[(param, (1, 0), INF) for param in params[10:40]] + [(params[3], (0, 0), 0.0)])
    lines = str(scaler.overflow_report()).splitlines()
    assert lines[0] == "The newest skipped step, at scale 65536: 30 of 50 gradients are not finite."
    assert " ".join(lines[1].split()) == "parameter group shape inf nan first at largest finite zeros"
    assert lines[2].endswith("layer.39.weight  0      [2, 3]  1    0    [1, 0]    1               0.0%")
    assert len(lines[2:22]) == 20
    assert lines[22] == "... and 10 more, in as_dict()"
    assert lines[23].endswith("layer.3.weight, 16.7%.")
    assert max(map(len, lines[:23])) <= 120
