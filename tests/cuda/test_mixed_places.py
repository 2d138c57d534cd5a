"""Parameters on the CPU and on a device at once: nobody reads a copy on the host before it has arrived."""

from itertools import product

import pytest
import torch
from torch import Tensor, nn

from mpkernels.amp import GradScaler, clip_grad_norm_, find_nonfinite
from mpkernels.optim import AdamW
from tests.cuda.training import CUDA

CPU = torch.device("cpu")
TWO, THREE = (list(product((CPU, CUDA), repeat=count))[1:] for count in (2, 3))  # without all on the CPU


def same_as_on_cpu(run, *places):
    """Run on these places. Assert that the results are those on a CPU, and return them."""
    on_cpu, ours = (
        [it.to("cpu") if isinstance(it, Tensor) else it for it in run(*where)]
        for where in ([CPU] * len(places), places)
    )
    for mine, wanted in zip(ours, on_cpu, strict=True):
        if isinstance(mine, Tensor):
            torch.testing.assert_close(mine, wanted, rtol=1e-6, atol=1e-6, equal_nan=True)
        else:
            assert mine == wanted
    return ours


def parameters(*places):
    return [nn.Parameter(torch.linspace(-1, i, 7).to(place)) for i, place in enumerate(places, 1)]


def set_grads(params, step=0, scale=1.0):
    """Set grads, other ones in each step. In the second step the last parameter's overflows."""
    for i, param in enumerate(params):
        param.grad = torch.full_like(param, (0.5 + i + step) * scale)
    if step == 1:
        params[-1].grad[2].fill_(torch.inf)


def trained(scale_place, params, optimizer, before_step=lambda scaler: None):
    """Return all state that the host can see after each of three steps, and the report."""
    scaler, results = GradScaler("cpu", init_scale=4.0, growth_interval=1), []
    for step, scale in enumerate((4.0, 8.0, 4.0)):
        scaler.scale(torch.ones((), device=scale_place))
        set_grads(params, step, scale)
        before_step(scaler)
        scaler.step(optimizer)
        scaler.update()
        results += [scaler.get_scale(), scaler.skipped_steps.item(), *(param.detach().clone() for param in params)]
    return [*results, str(scaler.overflow_report().as_dict())]


@pytest.mark.parametrize("places", THREE, ids=str)
@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("kind", [AdamW, torch.optim.SGD])
def test_a_scaled_step_gives_the_same(places, unscales, kind):
    def run(scale_place, *param_places):
        params = parameters(*param_places)
        optimizer = kind(params, lr=0.1)
        return trained(scale_place, params, optimizer, lambda scaler: unscales and scaler.unscale_(optimizer))

    results = same_as_on_cpu(run, *places)
    assert (results[0], results[4], results[8]) == (8.0, 4.0, 8.0)


@pytest.mark.parametrize("places", THREE, ids=str)
def test_two_optimizers_of_one_scaler_step_the_same(places):
    """Each optimizer has a found_inf of its own."""

    def run(scale_place, *param_places):
        params = parameters(*param_places)
        one, other = (AdamW([param], lr=0.1) for param in params)
        return trained(scale_place, params, one, lambda scaler: (scaler.unscale_(one), scaler.step(other)))

    same_as_on_cpu(run, *places)


@pytest.mark.parametrize("places", TWO, ids=str)
@pytest.mark.parametrize("options", [{"max_norm": 0.5}, {"guard": True}, {"lr": 0.5}], ids=str)
def test_a_step_that_checks_its_grads_itself_gives_the_same(places, options):
    def run(*places):
        params = parameters(*places)
        optimizer, results = AdamW(params, **options), []
        for step in range(3):
            set_grads(params, step)
            optimizer.step()
            visible = [optimizer.grad_norm, optimizer.skipped_steps, *params]
            results += [it if it is None else it.detach().clone() for it in visible]
        return results

    same_as_on_cpu(run, *places)


@pytest.mark.parametrize("places", TWO, ids=str)
@pytest.mark.parametrize("norm_type", [2.0, 3.0, torch.inf])
def test_clip_grad_norm_gives_the_same(places, norm_type):
    def run(*places):
        params = parameters(*places)
        set_grads(params)
        return clip_grad_norm_(params, 0.5, norm_type), *(param.grad for param in params)

    same_as_on_cpu(run, *places)


@pytest.mark.parametrize("places", TWO, ids=str)
def test_a_scale_that_is_given_to_update_is_used_everywhere(places):
    def run(scale_place, new_place):
        scaler = GradScaler("cpu")
        scaler.scale(torch.ones((), device=scale_place))
        scaler.update(torch.full((1,), 32.0, device=new_place))
        return [scaler.scale(torch.ones((), device=scale_place)), scaler.scale(torch.ones((), device=new_place))]

    assert same_as_on_cpu(run, *places) == [32.0, 32.0]


class Moves(nn.Module):
    """Gives tensors on both devices."""

    def __init__(self, places):
        super().__init__()
        self.places = places

    def forward(self, x):
        return [torch.full((3,), x, device=place) for place in self.places]


@pytest.mark.parametrize("places", TWO, ids=str)
@pytest.mark.parametrize("value", [1.0, torch.nan])
def test_find_nonfinite_reports_the_same(places, value):
    def run(*places):
        with find_nonfinite(model := Moves(places)) as found:
            model(value)
        return [str(found)]

    same_as_on_cpu(run, *places)


def test_outputs_on_both_places_are_scaled():
    def run(scale_place, output_place):
        scaler = GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.ones((), device=scale_place))
        outputs = [torch.ones(2, device=place) for place in (scale_place, output_place)]
        listed, (paired,) = scaler.scale(outputs), scaler.scale((tuple(outputs),))
        return *listed, *paired, *scaler.scale(iter(outputs))

    same_as_on_cpu(run, CUDA, CPU)
    with pytest.raises(ValueError, match="outputs must be a Tensor or an iterable of Tensors"):
        GradScaler("cpu").scale([1.0])
