"""A step of DTensors costs the host the same for any number of processes, and in proportion to tensors. Calls are
counted, not time. A fake process group stands for the other processes."""

from functools import partial
from itertools import count
from unittest import mock

import pytest
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.many_gpus import MODELS, SIDES, among, sharded
from mpkernels.amp import GradScaler, clip_grad_norm_
from mpkernels.bench.steps import scaler_of
from mpkernels.optim import AdamW
from tests.calls import calls_of

pytestmark = pytest.mark.exhaustive


def scaled_step(params):
    return SIDES["ours"](params)


def guarded_step(params):
    return AdamW(params, guard=True).step


def measure_the_norm(params):
    return partial(clip_grad_norm_, params, 1e9)


def clip(params):
    """Clip to half the norm in each run, because grads that are already clipped to a bound need no clipping."""
    bounds = (2.0**-i for i in count())
    return lambda: clip_grad_norm_(params, next(bounds))


def unscale(params):
    scaler, optimizer = scaler_of(GradScaler, "cpu"), AdamW(params)

    def run():
        scaler.unscale_(optimizer)
        scaler._per_optimizer_states.clear()  # lets it unscale again

    return run


def refuse(mesh):
    raise AssertionError("a step has read the ranks of a mesh")


def costs(make, ranks):
    """Return the calls of a third run, because earlier runs make states and plans, and look at each rank once. A count
    of calls doesn't show how long a list is that a call goes through, so the list of ranks may not be asked for."""
    runs = [make(sharded(tensors, ranks)) for tensors in (10, 20, 30)]
    for run in runs * 2:
        run()
    with mock.patch.object(DeviceMesh, "mesh", property(refuse)):
        return [calls_of(run) for run in runs]


@pytest.mark.parametrize(
    "make",
    [scaled_step, clip, guarded_step, measure_the_norm, unscale],
)
def test_cost_is_flat_in_ranks_and_linear_in_tensors(make):
    few, many = (among(ranks, partial(costs, make, ranks)) for ranks in (8, 16384))
    assert few == many
    assert few[2] - few[1] == few[1] - few[0] > 0


@pytest.mark.parametrize(("name", "billions"), [("1B", 1.236), ("8B", 8.03), ("70B", 70.55), ("405B", 405.9)])
def test_sizes_are_those_of_the_models(name, billions):
    assert sum(MODELS[name].sizes()) / 1e9 == pytest.approx(billions, rel=1e-3)
