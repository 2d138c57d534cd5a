"""GradScaler beside torch's own: the same calls, and after each call the same state."""

import pickle

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mpkernels.amp import GradScaler
from mpkernels.optim import AdamW

OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "torch's AdamW": lambda params: torch.optim.AdamW(params, lr=0.1),
    "torch's AdamW, fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "our AdamW": lambda params: AdamW(params, lr=0.1),
}
SCALINGS = {
    "dynamic": {},
    "bounded": {"min_scale": 1.0, "max_scale": 2.0**17, "hysteresis": 2},
    "static": {"scaling": "static"},
    "scheduled": {"scaling": [(0, 8.0), (2, 16.0)]},
}
INIT = {"init_scale": 2.0**10, "growth_interval": 2}
NEW_SCALES = 512.0, torch.tensor(2048.0), torch.ones(2), torch.ones((), requires_grad=True)
whose = st.integers(0, 1)
EVENTS = st.one_of(
    st.tuples(st.just("backward"), whose, st.sampled_from([None, None, None, float("inf"), float("nan")])),
    st.tuples(st.just("unscale"), whose),
    st.tuples(st.just("clip"), whose),
    st.tuples(st.just("step"), whose),
    st.tuples(st.just("step_with_closure"), whose),
    st.tuples(st.just("update"), st.sampled_from([None, None, None, *NEW_SCALES])),
    st.tuples(st.just("zero_grad"), whose),
    st.tuples(st.just("resume")),
    st.tuples(st.just("pickle")),
    st.tuples(st.just("policy"), st.integers(1, 3), st.sampled_from([0.5, 0.25])),
)


def one_param(make, device="cpu", dtype=torch.float32):
    param = torch.ones(3, dtype=dtype, device=device, requires_grad=True)
    return param, make([param])


def iterate(scaler, param, optimizer, bad=None):
    """Return the scale after one iteration. Unscaled grads are 1, except a bad one."""
    optimizer.zero_grad()
    scaler.scale(param.sum()).backward()
    if bad is not None:
        param.grad[1] = bad
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale()


class Side:
    """One scaler with two optimizers; a method for each event."""

    def __init__(self, scaler, make, device):
        self.scaler, self.device = scaler, device
        self.params = [[torch.full((3,), 1.0 + i, device=device, requires_grad=True)] for i in range(2)]
        self.optimizers = [make(params) for params in self.params]

    def backward(self, i, bad):
        (param,) = self.params[i]
        self.scaler.scale(param.square().sum()).backward()
        if bad is not None:
            param.grad[1] = bad

    def unscale(self, i):
        self.scaler.unscale_(self.optimizers[i])

    def clip(self, i):
        torch.nn.utils.clip_grad_norm_(self.params[i], 0.5)

    def step(self, i):
        return self.scaler.step(self.optimizers[i])

    def step_with_closure(self, i):
        self.scaler.step(self.optimizers[i], closure=lambda: 0.0)

    def update(self, new_scale):
        self.scaler.update(new_scale.to(self.device) if isinstance(new_scale, torch.Tensor) else new_scale)

    def zero_grad(self, i):
        self.optimizers[i].zero_grad()

    def resume(self):
        self.scaler.load_state_dict(self.scaler.state_dict())

    def pickle(self):
        self.scaler = pickle.loads(pickle.dumps(self.scaler))

    def policy(self, interval, backoff):
        self.scaler.set_growth_interval(interval)
        self.scaler.set_backoff_factor(backoff)

    def after(self, event, *arguments):
        """Return all state that users can see, with tensors apart from other values."""
        try:
            outcome = getattr(self, event)(*arguments)
        except Exception as error:
            outcome = type(error), str(error)
        stages = [state["stage"] for state in getattr(self.scaler, "_per_optimizer_states", {}).values()]
        handed_over = [hasattr(it, name) for it in self.optimizers for name in ("grad_scale", "found_inf", "outcome")]
        values = outcome, self.scaler.state_dict(), self.scaler.get_scale(), stages
        states = [list(optimizer.state.values()) for optimizer in self.optimizers]
        return values, ([(param.detach(), param.grad) for (param,) in self.params], states), any(handed_over)


def assert_lockstep(target, name, events, **options):
    make, device = OPTIMIZERS[name], target.device
    ours = Side(GradScaler(device.type, **INIT, **options), make, device)
    theirs = Side(torch.amp.GradScaler(device.type, **INIT, **options), make, device)
    for i, event in enumerate(events):
        (values, tensors, left_behind), (values_theirs, tensors_theirs, left_behind_theirs) = (
            side.after(*event) for side in (ours, theirs)
        )
        assert values == values_theirs, events[: i + 1]
        torch.testing.assert_close(tensors, tensors_theirs, rtol=0, atol=0, equal_nan=True)
        assert not left_behind
        if left_behind_theirs:  # the step has failed; torch's next step would divide by the scale twice
            return


@pytest.mark.each_value_once
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(events=st.lists(EVENTS, min_size=3, max_size=25))
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_events_leave_the_same_state_as_torchs_scaler(target, name, events):
    assert_lockstep(target, name, events)


ITERATION = [("zero_grad", 0), ("zero_grad", 1), ("backward", 0, None), ("backward", 1, None)]
STEPS = [("step", 0), ("step", 1), ("update", None)]


@pytest.mark.each_value_once
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    iterations=st.lists(st.tuples(st.lists(EVENTS, max_size=3), st.sampled_from([-1, -1, 0, 1])), max_size=8),
    enabled=st.booleans(),
)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_iterations_leave_the_same_state_as_torchs_scaler(target, name, iterations, enabled):
    """In each iteration both optimizers step; other events come in between, and one of the two may overflow."""
    events = []
    for between, overflowed in iterations:
        bad = [("backward", overflowed, float("inf"))] if overflowed >= 0 else []
        events += [*ITERATION, *bad, *between, *STEPS]
    assert_lockstep(target, name, events, enabled=enabled)


def test_wrong_calls_raise():
    """Without this, equal exceptions of both scalers would prove nothing."""
    texts = []
    for events in (
        [("unscale", 0)],
        [("update", None)],
        [("backward", 0, None), ("update", None)],
        [("backward", 0, None), ("unscale", 0), ("unscale", 0)],
        [("backward", 0, None), ("step", 0), ("unscale", 0)],
        [("backward", 0, None), ("step", 0), ("step", 0)],
        [("backward", 0, None), ("step", 1)],
        [("backward", 0, None), ("step_with_closure", 0)],
        [("backward", 0, None), ("step", 0), ("pickle",)],
        [("backward", 0, None), ("update", NEW_SCALES[2])],
        [("backward", 0, None), ("update", NEW_SCALES[3])],
    ):
        for name in ("SGD", "our AdamW"):
            side = Side(GradScaler("cpu", **INIT), OPTIMIZERS[name], torch.device("cpu"))
            results = [side.after(*event)[0][0] for event in events]
            assert all(result is None for result in results[:-1])
            texts.append(results[-1])
    assert all(text is not None for i, text in enumerate(texts) if i != 13), texts  # our AdamW steps without grads, too
