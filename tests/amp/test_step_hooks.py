"""Step hooks and a subclass's own step see unscaled grads under both scalers, and run only where a step is taken."""

import functools
import math
from contextlib import ExitStack, contextmanager

import pytest
import torch
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import mpkernels
from mpkernels import Metrics
from mpkernels.amp import GradScaler
from mpkernels.optim import AdamW
from tests.amp.test_amp_steps import Watch
from tests.hard_grads import same_bits
from tests.networks import B16, F16, backward, network

SCALERS = {"ours": GradScaler, "torch's": torch.amp.GradScaler}
each_scaler = pytest.mark.parametrize("scaler_kind", SCALERS.values(), ids=SCALERS)


def look(optimizer, *_):
    optimizer.seen.append([param.grad.clone() for param in optimizer.param_groups[0]["params"]])


def clip(optimizer, *_):
    look(optimizer)
    torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.25)


class Clips(AdamW):
    def step(self, closure=None):
        clip(self)
        return super().step(closure)


class LooksLikeOurs(AdamW):
    @functools.wraps(AdamW.step)
    def step(self, closure=None):
        clip(self)
        return super().step(closure)


class Mixin:
    def step(self, closure=None):
        clip(self)
        return super().step(closure)


class Mixed(Mixin, AdamW):
    pass


WAYS = {
    "a hook before": (AdamW, lambda optimizer: optimizer.register_step_pre_hook(clip)),
    "a hook after": (AdamW, lambda optimizer: optimizer.register_step_post_hook(look)),
    "everybody's hook before": (AdamW, lambda optimizer: register_optimizer_step_pre_hook(clip)),
    "everybody's hook after": (AdamW, lambda optimizer: register_optimizer_step_post_hook(look)),
    "a subclass": (Clips, None),
    "a subclass whose step says that it is ours": (LooksLikeOurs, None),
    "a mixin": (Mixed, None),
    "a subclass of a subclass": (type("Deeper", (Clips,), {}), None),
}
AFTER = [way for name, way in WAYS.items() if "after" in name]
each_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


@contextmanager
def watched(way, model, **options):
    kind, register = way
    optimizer = kind(model.parameters(), lr=0.1, **options)
    optimizer.seen = []
    with ExitStack() as stack:
        if register is not None:
            stack.callback(register(optimizer).remove)
        yield optimizer


def steps(model, optimizer, scaler, values=(1.0,), before_step=lambda: None):
    for seed, value in enumerate(values):
        backward(model, seed, scaler.scale(torch.ones(())).item())
        model[0].bias.grad[0] *= value
        before_step()
        scaler.step(optimizer)
        scaler.update()


OPTIONS = [
    (torch.float32, {}),
    (torch.float32, {"max_norm": 0.5}),
    (B16, {"master": "fp32"}),
    (B16, {"state_dtype": torch.int8, "guard": False}),
    (F16, {"amsgrad": True}),
]


@pytest.mark.parametrize(("dtype", "options"), OPTIONS, ids=str)
@each_scaler
@each_way
def test_hooks_see_unscaled_grads_and_what_they_change_counts(way, scaler_kind, dtype, options):
    """The result is the same as if the loop unscales and clips by itself."""
    ours, by_hand = network(dtype), network(dtype)
    with watched(way, ours, **options) as optimizer:
        steps(ours, optimizer, scaler_kind("cpu", init_scale=1024.0), (1.0, 1.0, 1.0))
    reference, scaler = AdamW(by_hand.parameters(), lr=0.1, **options), GradScaler("cpu", init_scale=1024.0)
    reference.seen = []

    def unscale_and_clip():
        scaler.unscale_(reference)
        (look if way in AFTER else clip)(reference)

    steps(by_hand, reference, scaler, (1.0, 1.0, 1.0), unscale_and_clip)
    assert len(optimizer.seen) == 3
    for seen, wanted in zip(optimizer.seen, reference.seen, strict=True):
        assert all(map(same_bits, seen, wanted))
    assert all(map(same_bits, ours.parameters(), by_hand.parameters()))
    assert not vars(optimizer).keys() & {"grad_scale", "found_inf", "outcome", "peers"}


@each_scaler
@each_way
def test_a_skipped_step_runs_no_hook_but_is_reported(way, scaler_kind):
    model, scaler = network(), scaler_kind("cpu", init_scale=1024.0)
    with watched(way, model) as optimizer:
        metrics, found, kept = Metrics(optimizer, scaler), [], []
        for value in (1.0, math.inf, math.nan, 1.0):
            before = [param.detach().clone() for param in model.parameters()]
            steps(model, optimizer, scaler, (value,))
            kept.append(all(map(same_bits, model.parameters(), before)))
            found.append((len(optimizer.seen), optimizer.step_was_skipped.item(), metrics.read()["skipped_steps"]))
        assert kept == [False, True, True, False]
        assert found == [(1, False, 0.0), (1, True, 1.0), (1, True, 2.0), (2, False, 2.0)]
        assert scaler.get_scale() == 256.0
        report = optimizer.overflow_report(model) if scaler_kind is not GradScaler else scaler.overflow_report(model)
    assert [it.name for it in report.culprits] == ["0.bias"]
    assert (optimizer.skipped_steps.item(), optimizer.state[model[0].bias]["step"].item()) == (2.0, 2.0)


@each_scaler
@each_way
def test_grads_that_the_loop_has_unscaled_are_not_unscaled_again(way, scaler_kind):
    models = [network(), network()]
    for model, unscales in zip(models, (False, True), strict=True):
        scaler = scaler_kind("cpu", init_scale=1024.0)
        with watched(way, model) as optimizer:
            unscale = functools.partial(scaler.unscale_, optimizer) if unscales else (lambda: None)
            steps(model, optimizer, scaler, (1.0, math.inf, 1.0), unscale)
        assert (len(optimizer.seen), scaler.get_scale()) == (2, 512.0)
    assert all(map(same_bits, models[0].parameters(), models[1].parameters()))


class Plain(AdamW):
    """A subclass without a step of its own."""


def scheduled(optimizer):
    StepLR(optimizer, 3)


def compiled(optimizer):
    optimizer.step = torch.compile(optimizer.step, backend="eager", disable=True)


def replaced(optimizer):
    """Replace the optimizer's step, as Accelerate does to see whether it is called."""
    step = optimizer.step
    optimizer.step = lambda *args: step(*args)


PASSIVE = {
    "nothing": lambda optimizer: None,
    "a scheduler": scheduled,
    "metrics": Metrics,
    "torch.compile": compiled,
    "a function that is set on the optimizer": replaced,
    "torch's profiler": lambda optimizer: optimizer.register_step_post_hook(torch.profiler._optimizer_post_hook),
}


@pytest.mark.parametrize("kind", [AdamW, Plain, type("New", (AdamW,), {})])
@pytest.mark.parametrize("add", PASSIVE.values(), ids=PASSIVE)
def test_what_looks_at_no_grads_costs_no_wait_and_no_unscaling(kind, add):
    """With passive hooks, the host doesn't wait and no grad is written: the step unscales."""
    model, scaler = network(), GradScaler("cpu", init_scale=1024.0)
    optimizer = kind(model.parameters(), lr=0.1)
    add(optimizer)
    assert optimizer._step_supports_amp_scaling
    for value in (1.0, math.inf):
        backward(model, 0, scaler.scale(torch.ones(())).item())
        model[0].bias.grad[0] *= value
        grads = [param.grad.clone() for param in model.parameters()]
        with Watch() as watch:
            scaler.step(optimizer)
        scaler.update()
        assert not any("unscale" in name for name in watch.seen)
        assert all(map(same_bits, (it.grad for it in model.parameters()), grads))


def test_a_profile_leaves_the_unscaling_to_the_step(tmp_path):
    model, scaler = network(), GradScaler("cpu", init_scale=1024.0)
    optimizer = AdamW(model.parameters(), lr=0.1)
    backward(model, 0, scaler.scale(torch.ones(())).item())
    with mpkernels.profile(tmp_path / "trace.json"):
        assert optimizer._step_supports_amp_scaling
        scaler.step(optimizer)


@each_way
def test_step_supports_amp_scaling_is_false_while_something_looks_at_grads(way):
    """Lightning and Fabric read it, and clip by themselves where it is False."""
    with watched(way, network()) as optimizer:
        assert not optimizer._step_supports_amp_scaling
        assert not optimizer.seen
    if way[1] is not None:
        assert optimizer._step_supports_amp_scaling


@each_scaler
def test_a_skip_counts_once_however_often_a_scaler_asks(scaler_kind):
    class Asks(scaler_kind):
        def step(self, optimizer, *args, **kwargs):
            self.is_taken = optimizer._step_supports_amp_scaling
            return super().step(optimizer, *args, **kwargs)

    scaler, optimizer = Asks("cpu"), AdamW([param := torch.nn.Parameter(torch.ones(3))])
    optimizer.register_step_post_hook(lambda *_: None)
    for skips, value in ((1, math.inf), (1, 1.0), (2, math.nan)):
        param.grad = scaler.scale(torch.full((3,), value))
        scaler.step(optimizer)
        scaler.update()
        assert (optimizer.skipped_steps, scaler.is_taken) == (skips, value == 1)
