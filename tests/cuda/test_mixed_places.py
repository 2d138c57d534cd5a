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


def same(run, *places):
    """Return the CPU's results, after asserting that these devices give the same."""
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
    """Set random grads. In the second step the last parameter's overflows."""
    for i, param in enumerate(params):
        param.grad = torch.full_like(param, (0.5 + i + step) * scale)
    if step == 1:
        params[-1].grad[2].fill_(torch.inf)


def trained(of_scale, params, optimizer, before_step=lambda scaler: None):
    """Return all state that the host can see after three steps."""
    scaler, seen = GradScaler("cpu", init_scale=4.0, growth_interval=1), []
    for step, scale in enumerate((4.0, 8.0, 4.0)):
        scaler.scale(torch.ones((), device=of_scale))
        set_grads(params, step, scale)
        before_step(scaler)
        scaler.step(optimizer)
        scaler.update()
        seen += [scaler.get_scale(), scaler.skipped_steps.item(), *(param.detach().clone() for param in params)]
    return [*seen, str(scaler.overflow_report().as_dict())]


@pytest.mark.parametrize("places", THREE, ids=str)
@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("kind", [AdamW, torch.optim.SGD])
def test_a_scaled_step(places, unscales, kind):
    def run(of_scale, *of_params):
        params = parameters(*of_params)
        optimizer = kind(params, lr=0.1)
        return trained(of_scale, params, optimizer, lambda scaler: unscales and scaler.unscale_(optimizer))

    seen = same(run, *places)
    assert (seen[0], seen[4], seen[8]) == (8.0, 4.0, 8.0)


@pytest.mark.parametrize("places", THREE, ids=str)
def test_two_optimizers_of_one_scaler(places):
    """Each optimizer has a found_inf of its own."""

    def run(of_scale, *of_params):
        params = parameters(*of_params)
        one, other = (AdamW([param], lr=0.1) for param in params)
        return trained(of_scale, params, one, lambda scaler: (scaler.unscale_(one), scaler.step(other)))

    same(run, *places)


@pytest.mark.parametrize("places", TWO, ids=str)
@pytest.mark.parametrize("options", [{"max_norm": 0.5}, {"guard": True}, {"lr": 0.5}], ids=str)
def test_a_step_that_looks_for_itself(places, options):
    def run(*places):
        params = parameters(*places)
        optimizer, seen = AdamW(params, **options), []
        for step in range(3):
            set_grads(params, step)
            optimizer.step()
            told = [optimizer.grad_norm, optimizer.skipped_steps, *params]
            seen += [it if it is None else it.detach().clone() for it in told]
        return seen

    same(run, *places)


@pytest.mark.parametrize("places", TWO, ids=str)
@pytest.mark.parametrize("norm_type", [2.0, 3.0, torch.inf])
def test_clip_grad_norm(places, norm_type):
    def run(*places):
        params = parameters(*places)
        set_grads(params)
        return clip_grad_norm_(params, 0.5, norm_type), *(param.grad for param in params)

    same(run, *places)


@pytest.mark.parametrize("places", TWO, ids=str)
def test_a_scale_that_is_handed_over(places):
    def run(of_scale, of_new):
        scaler = GradScaler("cpu")
        scaler.scale(torch.ones((), device=of_scale))
        scaler.update(torch.full((1,), 32.0, device=of_new))
        return [scaler.scale(torch.ones((), device=of_scale)), scaler.scale(torch.ones((), device=of_new))]

    assert same(run, *places) == [32.0, 32.0]


class Moves(nn.Module):
    """Gives tensors on both devices."""

    def __init__(self, places):
        super().__init__()
        self.places = places

    def forward(self, x):
        return [torch.full((3,), x, device=place) for place in self.places]


@pytest.mark.parametrize("places", TWO, ids=str)
@pytest.mark.parametrize("value", [1.0, torch.nan])
def test_find_nonfinite(places, value):
    def run(*places):
        with find_nonfinite(model := Moves(places)) as found:
            model(value)
        return [str(found)]

    same(run, *places)


def test_a_scale_for_outputs_on_both():
    def run(of_scale, of_output):
        scaler = GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.ones((), device=of_scale))
        outputs = [torch.ones(2, device=place) for place in (of_scale, of_output)]
        listed, (paired,) = scaler.scale(outputs), scaler.scale((tuple(outputs),))
        return *listed, *paired, *scaler.scale(iter(outputs))

    same(run, CUDA, CPU)
    with pytest.raises(ValueError, match="outputs must be a Tensor or an iterable of Tensors"):
        GradScaler("cpu").scale([1.0])
