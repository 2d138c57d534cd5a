"""GradScaler beside torch's own: the same events, and after each of them the same of everything."""

import copy
import inspect
import pickle

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mpkernels.amp import GradScaler
from mpkernels.optim import AdamW
from tests.networks import network, one_thread, train

__all__ = ["one_thread"]  # a fixture that each test uses

OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "torch's AdamW": lambda params: torch.optim.AdamW(params, lr=0.1),
    "torch's AdamW, fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "our AdamW": lambda params: AdamW(params, lr=0.1),
}
INIT = {"init_scale": 2.0**10, "growth_interval": 2}
which = st.integers(0, 1)
EVENTS = st.one_of(
    st.tuples(st.just("backward"), which, st.sampled_from([None, None, None, float("inf"), float("nan")])),
    st.tuples(st.just("unscale"), which),
    st.tuples(st.just("clip"), which),
    st.tuples(st.just("step"), which),
    st.tuples(st.just("step_with_closure"), which),
    st.tuples(st.just("update"), st.sampled_from([None, None, None, 512.0, torch.tensor(2048.0), torch.ones(2)])),
    st.tuples(st.just("zero_grad"), which),
    st.tuples(st.just("resume")),
    st.tuples(st.just("pickle")),
    st.tuples(st.just("policy"), st.integers(1, 3), st.sampled_from([0.5, 0.25])),
)


class Side:
    """One scaler, two optimizers."""

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
        """All that can be told from outside; the tensors apart."""
        try:
            outcome = getattr(self, event)(*arguments)
        except Exception as error:
            outcome = type(error), str(error)
        stages = [state["stage"] for state in getattr(self.scaler, "_per_optimizer_states", {}).values()]
        handed_over = [hasattr(it, name) for it in self.optimizers for name in ("grad_scale", "found_inf")]
        told = outcome, self.scaler.state_dict(), self.scaler.get_scale(), stages
        states = [list(optimizer.state.values()) for optimizer in self.optimizers]
        return told, ([(param.detach(), param.grad) for (param,) in self.params], states), any(handed_over)


def assert_lockstep(target, name, events, **options):
    make, device = OPTIMIZERS[name], target.device
    ours = Side(GradScaler(device.type, **INIT, **options), make, device)
    theirs = Side(torch.amp.GradScaler(device.type, **INIT, **options), make, device)
    for i, event in enumerate(events):
        (told, tensors, left_behind), (told_theirs, tensors_theirs, left_behind_theirs) = (
            side.after(*event) for side in (ours, theirs)
        )
        assert told == told_theirs, events[: i + 1]
        torch.testing.assert_close(tensors, tensors_theirs, rtol=0, atol=0, equal_nan=True)
        assert not left_behind
        if left_behind_theirs:  # an error in the step; torch's next one would divide by the scale twice
            return


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(events=st.lists(EVENTS, min_size=3, max_size=25))
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_events_as_torch_does_them(target, name, events):
    assert_lockstep(target, name, events)


ITERATION = [("zero_grad", 0), ("zero_grad", 1), ("backward", 0, None), ("backward", 1, None)]
STEPS = [("step", 0), ("step", 1), ("update", None)]


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    iterations=st.lists(st.tuples(st.lists(EVENTS, max_size=3), st.sampled_from([-1, -1, 0, 1])), max_size=8),
    enabled=st.booleans(),
)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_as_torch_does_it(target, name, iterations, enabled):
    """Whole iterations, with something else in between, and an overflow in one of the two."""
    events = []
    for between, overflowed in iterations:
        bad = [("backward", overflowed, float("inf"))] if overflowed >= 0 else []
        events += [*ITERATION, *bad, *between, *STEPS]
    assert_lockstep(target, name, events, enabled=enabled)


def test_what_must_raise_raises():
    """So that equal exceptions mean something."""
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
        [("backward", 0, None), ("update", torch.ones(2))],
    ):
        for name in ("SGD", "our AdamW"):
            side = Side(GradScaler("cpu", **INIT), OPTIMIZERS[name], torch.device("cpu"))
            results = [side.after(*event)[0][0] for event in events]
            assert all(result is None for result in results[:-1])
            texts.append(results[-1])
    assert all(text is not None for i, text in enumerate(texts) if i != 13), texts  # our AdamW steps nothing gladly


def test_signature():
    """torch's, but that no device is named: what comes beyond it has keywords."""
    ours = list(inspect.signature(GradScaler).parameters.values())
    theirs = list(inspect.signature(torch.amp.GradScaler).parameters.values())
    assert [(it.name, it.kind) for it in ours[: len(theirs)]] == [(it.name, it.kind) for it in theirs]
    assert [it.default for it in ours[1 : len(theirs)]] == [it.default for it in theirs[1:]]
    assert all(it.kind is it.KEYWORD_ONLY for it in ours[len(theirs) :])
    assert issubclass(GradScaler, torch.amp.GradScaler)  # which trainers ask for


@pytest.mark.parametrize("bad", [{"growth_factor": 1.0}, {"backoff_factor": 1.0}])
def test_torchs_own_bad_arguments(bad):
    errors = []
    for kind in (GradScaler, torch.amp.GradScaler):
        with pytest.raises(AssertionError) as error:
            kind("cpu", **bad)
        errors.append(str(error.value))
    assert errors[0] == errors[1]


def test_a_device_that_is_not_there_disables_it_as_in_torch():
    if torch.cuda.is_available():
        pytest.skip("needs a machine without CUDA")
    with pytest.warns(UserWarning, match="CUDA is not available.  Disabling"):
        assert not GradScaler("cuda").is_enabled()


def test_scale_takes_any_nesting_of_outputs():
    scaler, theirs = GradScaler("cpu", **INIT), torch.amp.GradScaler("cpu", **INIT)
    outputs = [torch.ones(2), (torch.ones(()), [torch.ones(1).double()])]
    torch.testing.assert_close(scaler.scale(outputs), theirs.scale(outputs))
    with pytest.raises(ValueError, match="outputs must be a Tensor or an iterable of Tensors"):
        scaler.scale(3)


def test_lbfgs_raises_what_it_raises_under_torch():
    param = torch.ones(3, requires_grad=True)
    errors = []
    for kind in (GradScaler, torch.amp.GradScaler):
        scaler = kind("cpu")
        scaler.scale(param.sum()).backward()
        with pytest.raises(TypeError) as error:
            scaler.step(torch.optim.LBFGS([param]))
        errors.append(str(error.value))
    assert errors[0] == errors[1]


@pytest.mark.parametrize("coalesced", [True, False])
def test_sparse_grads(coalesced):
    def run(kind, dtype):
        torch.manual_seed(0)
        embedding, scaler = torch.nn.Embedding(10, 3, sparse=True).to(dtype), kind("cpu", **INIT)
        optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
        for bad in (1.0, float("inf"), 1.0):
            optimizer.zero_grad()
            scaler.scale(embedding(torch.tensor([1, 1, 2])).sum() * bad).backward()
            embedding.weight.grad = embedding.weight.grad.coalesce() if coalesced else embedding.weight.grad
            scaler.step(optimizer)
            scaler.update()
        return embedding.weight.detach(), scaler.get_scale()

    torch.testing.assert_close(run(GradScaler, torch.float32), run(torch.amp.GradScaler, torch.float32))
    weight, scale = run(GradScaler, torch.float16)  # torch refuses
    assert scale == 512.0
    torch.testing.assert_close(weight.float(), run(GradScaler, torch.float32)[0], rtol=0, atol=2e-2)


def test_a_loop_of_autocast_unscale_and_clip():
    """The usual one, but for the import; with gradients that add up over two backwards."""
    results = []
    for kind in (GradScaler, torch.amp.GradScaler):
        model = network()
        optimizer, scaler = torch.optim.AdamW(model.parameters(), lr=1e-2), kind("cpu", **INIT)
        for seed in range(8):
            inputs = torch.randn(16, 20, generator=torch.Generator().manual_seed(seed))
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(inputs).float().square().mean() / 2
            scaler.scale(loss).backward()
            if seed % 2:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        results.append((copy.deepcopy(model.state_dict()), scaler.state_dict()))
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_disabled_it_passes_everything_through():
    model = network(torch.bfloat16)
    optimizer, scaler = AdamW(model.parameters()), GradScaler("cpu", enabled=False)
    train(model, optimizer, 1)
    loss = torch.ones(())
    assert scaler.scale(loss) is loss
    model[0].bias.grad[0] = float("nan")
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    scaler.load_state_dict({})
    assert optimizer.skipped_steps.item() == 1  # by AdamW's own guard
    assert (scaler.state_dict(), scaler.get_scale(), scaler.skipped_steps) == ({}, 1.0, None)
    assert not pickle.loads(pickle.dumps(scaler)).is_enabled()
