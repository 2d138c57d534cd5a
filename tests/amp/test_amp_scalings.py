"""How GradScaler's scale moves with options that torch's scaler lacks."""

import math
import re

import pytest
import torch

from mpkernels.amp import GradScaler
from mpkernels.amp.scalings import DEFAULTS
from tests.amp.test_grad_scaler import OPTIMIZERS, SCALINGS, iterate, one_param

INF = math.inf


def scales(scaler, overflows, make=OPTIMIZERS["our AdamW"]):
    param, optimizer = one_param(make)
    return [iterate(scaler, param, optimizer, INF if bad else None) for bad in overflows]


def test_a_static_scale_stays_and_an_overflow_still_skips():
    scaler = GradScaler("cpu", init_scale=128.0, scaling="static")
    assert scales(scaler, [0, 1, 0, 1]) == [128.0] * 4
    assert scaler.skipped_steps.item() == 2
    scaler.update(64.0)
    assert scales(scaler, [0]) == [64.0]


@pytest.mark.parametrize(
    "schedule", [[(0, 8.0), (2, 4), (4, 2.0)], lambda step: 2.0 ** (3 - step // 2)], ids=["list", "callable"]
)
def test_a_schedule_counts_updates(schedule):
    scaler = GradScaler("cpu", scaling=schedule)
    assert scaler.get_scale() == 8.0
    assert scales(scaler, [0, 1, 0, 0, 0]) == [8.0, 4.0, 4.0, 2.0, 2.0]
    assert scaler.skipped_steps.item() == 1


def test_the_scale_stays_within_its_bounds():
    assert scales(GradScaler("cpu", init_scale=4.0, min_scale=1.5), [1, 1, 1]) == [2.0, 1.5, 1.5]
    assert scales(GradScaler("cpu", init_scale=4.0, growth_interval=1, max_scale=10.0), [0, 0, 0]) == [8.0, 10.0, 10.0]
    scaler = GradScaler("cpu", init_scale=4.0, min_scale=4.0, max_scale=4.0, growth_interval=1)
    assert scales(scaler, [0, 1, 0]) == [4.0, 4.0, 4.0]
    assert scaler.skipped_steps.item() == 1


@pytest.mark.parametrize("is_in_use", [False, True])
def test_a_scale_that_is_loaded_or_set_stays_within_the_bounds(is_in_use):
    for theirs in (GradScaler, torch.amp.GradScaler):
        for saved, wanted in ((2.0**-60, 1.0), (0.0, 1.0), (2.0**20, 1024.0), (8.0, 8.0)):
            scaler = GradScaler("cpu", init_scale=2.0, min_scale=1.0, max_scale=1024.0)
            if is_in_use:
                scaler.scale(torch.ones(()))
            scaler.load_state_dict(theirs("cpu").state_dict() | {"scale": saved})
            assert scaler.get_scale() == wanted
            assert scaler.scale(torch.ones(())) == wanted
            for new_scale in (saved, torch.tensor([saved])):
                scaler.update(8.0)
                scaler.update(new_scale)
                assert scaler.get_scale() == wanted


def test_hysteresis_waits_for_overflows_in_a_row():
    scaler = GradScaler("cpu", init_scale=16.0, hysteresis=2)
    assert scales(scaler, [1, 0, 1, 1, 1, 0, 1]) == [16, 16, 16, 8, 4, 4, 4]


KNOWN = "'dynamic', 'static', a callable or a list of (step, scale)"
FINITE = "a finite fp32 number above 0"
IMPOSSIBLE = [
    ({"scaling": "dynamical"}, f"scaling must be {KNOWN}, got 'dynamical'"),
    ({"scaling": []}, f"scaling must be {KNOWN}, got []"),
    ({"scaling": [8.0]}, f"scaling must be {KNOWN}, got [8.0]"),
    ({"scaling": None}, f"scaling must be {KNOWN}, got None"),
    ({"scaling": [(1, 8.0)]}, "scaling must be steps that ascend from 0, got [(1, 8.0)]"),
    ({"scaling": [(0, 8.0), (0, 4.0)]}, "scaling must be steps that ascend from 0, got [(0, 8.0), (0, 4.0)]"),
    ({"scaling": [(0, 0.0)]}, "scaling must be finite fp32 scales above 0, got [(0, 0.0)]"),
    ({"scaling": [(0, 8.0)], "init_scale": 4.0}, "init_scale must be left at 65536.0 with a schedule, got 4.0"),
    ({"scaling": "static", "growth_factor": 4.0}, "growth_factor must be left at 2.0 with scaling='static', got 4.0"),
    ({"scaling": "static", "growth_interval": 1}, "growth_interval must be left at 2000 with scaling='static', got 1"),
    ({"scaling": "static", "hysteresis": 2}, "hysteresis must be left at 1 with scaling='static', got 2"),
    ({"scaling": "static", "min_scale": 1.0}, "min_scale must be left at 0.0 with scaling='static', got 1.0"),
    ({"scaling": max, "backoff_factor": 0.1}, "backoff_factor must be left at 0.5 with a schedule, got 0.1"),
    ({"min_scale": -1.0}, "min_scale must be 0 or more, got -1.0"),
    ({"min_scale": 8.0, "max_scale": 4.0}, "max_scale must be min_scale, 8.0, or more, got 4.0"),
    ({"max_scale": 4.0}, "init_scale must be from 0.0 to 4.0, got 65536.0"),
    ({"hysteresis": 0}, "hysteresis must be an int, 1 or more, got 0"),
    ({"hysteresis": 1.5}, "hysteresis must be an int, 1 or more, got 1.5"),
    ({"growth_interval": 2000.0}, "growth_interval must be an int, got 2000.0"),
    ({"growth_factor": math.nan}, "growth_factor must be a number, got nan"),
    ({"min_scale": math.nan}, "min_scale must be a number, got nan"),
    *(({"init_scale": it}, f"init_scale must be {FINITE}, got {it}") for it in (0.0, -1, INF, 1e39)),
    ({"init_scale": 0.0, "scaling": "static"}, f"init_scale must be {FINITE}, got 0.0"),
    ({"device": "gpu"}, "device must be a type of device, such as 'cuda', got 'gpu'"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "text"), IMPOSSIBLE, ids=[text for _, text in IMPOSSIBLE])
def test_impossible_options_are_refused(options, text):
    with pytest.raises(ValueError, match=f"^{re.escape(f'GradScaler: {text}')}$"):
        GradScaler(**{"device": "cpu"} | options)


@pytest.mark.parametrize("bad", ["big", None, [8.0]], ids=str)
@pytest.mark.parametrize("name", DEFAULTS)
def test_an_option_that_is_no_number_is_refused_at_once(name, bad):
    with pytest.raises(TypeError, match=f"^{re.escape(f'GradScaler: {name} must be a number, got {bad!r}')}$"):
        GradScaler("cpu", **{name: bad})


@pytest.mark.parametrize("device", [2.0**16, 8, True], ids=str)
def test_a_device_that_is_no_device_is_refused(device):
    """A scale, which came first in the old torch.cuda.amp.GradScaler."""
    with pytest.raises(TypeError, match=f"^GradScaler: device must be a type of device, such as 'cuda', got {device}$"):
        GradScaler(device)


def test_a_disabled_scaler_takes_any_of_torchs_options():
    scaler = GradScaler("gpu", "big", None, None, None, enabled=False, max_scale=8.0)
    assert not scaler.is_enabled()


@pytest.mark.parametrize("bad", [math.nan, INF, 0.0, -1, 1e39, torch.tensor(math.nan), torch.tensor([INF])], ids=str)
def test_a_new_scale_that_is_no_scale_is_refused(bad):
    scaler = GradScaler("cpu")
    scales(scaler, [0])
    got = bad.item() if isinstance(bad, torch.Tensor) else bad
    text = f"GradScaler.update: new_scale must be {FINITE}, got {got}"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        scaler.update(bad)
    assert scales(scaler, [1]) == [2.0**15]


@pytest.mark.parametrize("bad", [0.0, -2.0, float("inf"), float("nan"), 1e-50, 1e300, None, "8"])
def test_a_schedule_that_returns_no_scale_is_refused(bad):
    scaler = GradScaler("cpu", scaling=lambda updates: 8.0 if updates < 2 else bad)
    with pytest.raises(
        ValueError, match=rf"^GradScaler: scaling must return finite .*, got {re.escape(str(bad))} after 2 updates$"
    ):
        scales(scaler, [0, 0])
    assert scaler.get_scale() == 8.0
    with pytest.raises(ValueError, match=r"after 0 updates$"):
        GradScaler("cpu", scaling=lambda _: bad)


def test_a_schedule_takes_no_other_scale():
    scaler = GradScaler("cpu", scaling=[(0, 8.0)])
    scales(scaler, [0])
    with pytest.raises(ValueError, match=r"GradScaler\.update: new_scale must be None with a schedule, got 4\.0"):
        scaler.update(4.0)
    assert scaler.get_scale() == 8.0


def test_the_state_dict_has_more_than_torchs_only_in_modes_that_torch_lacks():
    theirs = torch.amp.GradScaler("cpu").state_dict()
    assert GradScaler("cpu").state_dict() == theirs
    for name in ("bounded", "static", "scheduled"):
        ours = GradScaler("cpu", **SCALINGS[name]).state_dict()
        assert ours.keys() > theirs.keys()
        torch.amp.GradScaler("cpu").load_state_dict(ours)


@pytest.mark.parametrize("late", [False, True], ids=["before the first scale", "after it"])
@pytest.mark.parametrize("name", SCALINGS)
def test_the_scale_goes_on_from_a_state_dict(name, late):
    first, second = GradScaler("cpu", **SCALINGS[name]), GradScaler("cpu", **SCALINGS[name])
    scales(first, [1, 0, 1])
    if late:
        scales(second, [0])
    second.load_state_dict(first.state_dict())
    assert second.get_scale() == first.get_scale()
    assert scales(second, [1, 0]) == scales(first, [1, 0])
    assert second.state_dict() == first.state_dict()


def test_torchs_state_loads_in_each_mode():
    """A dynamic scaler takes the scale from torch's state; others go on with the scale from their constructor."""
    theirs = torch.amp.GradScaler("cpu", init_scale=32.0, growth_interval=7).state_dict()
    for name, scale in (("dynamic", 32.0), ("bounded", 32.0), ("static", 65536.0), ("scheduled", 8.0)):
        scaler = GradScaler("cpu", **SCALINGS[name])
        scaler.load_state_dict(theirs)
        assert scaler.get_scale() == scale
        assert scaler.get_growth_interval() == (7 if name in ("dynamic", "bounded") else 2000)
    dynamic = GradScaler("cpu")
    dynamic.load_state_dict(GradScaler("cpu", init_scale=64.0, scaling="static").state_dict())
    assert (dynamic.get_scale(), dynamic.get_growth_factor()) == (64.0, 2.0)
    with pytest.raises(RuntimeError, match="The source state dict is empty"):
        GradScaler("cpu", scaling="static").load_state_dict({})
