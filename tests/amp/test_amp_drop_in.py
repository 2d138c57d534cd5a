"""Loops written for torch's GradScaler run under ours."""

import copy
import inspect
import math
import pickle
from functools import partial

import pytest
import torch

from mpkernels import amp
from mpkernels.amp import GradScaler
from mpkernels.optim import AdamW
from tests.amp.test_grad_scaler import INIT
from tests.networks import backward, network, train


def test_the_signature_is_torchs_and_our_options_are_keywords():
    """The signature is torch's, except that device has no name as a default; our own options are keywords."""
    ours = list(inspect.signature(GradScaler).parameters.values())
    theirs = list(inspect.signature(torch.amp.GradScaler).parameters.values())
    assert [(it.name, it.kind) for it in ours[: len(theirs)]] == [(it.name, it.kind) for it in theirs]
    assert [it.default for it in ours[1 : len(theirs)]] == [it.default for it in theirs[1:]]
    assert all(it.kind is it.KEYWORD_ONLY for it in ours[len(theirs) :])
    assert issubclass(GradScaler, torch.amp.GradScaler)  # trainers check for it


@pytest.mark.parametrize("bad", [{"growth_factor": 1.0}, {"backoff_factor": 1.0}])
def test_bad_arguments_raise_torchs_errors(bad):
    errors = []
    for kind in (GradScaler, torch.amp.GradScaler):
        with pytest.raises(AssertionError) as error:
            kind("cpu", **bad)
        errors.append(str(error.value))
    assert errors[0] == errors[1]


def test_a_missing_device_disables_the_scaler_as_in_torch():
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
def test_sparse_grads_are_unscaled_as_by_torch_and_in_fp16_too(coalesced):
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
    weight, scale = run(GradScaler, torch.float16)  # torch refuses fp16
    assert scale == 512.0
    torch.testing.assert_close(weight.float(), run(GradScaler, torch.float32)[0], rtol=0, atol=2e-2)


def test_a_sparse_fp16_grad_whose_values_overflow_when_added_up_halves_the_scale():
    embedding, scaler = torch.nn.Embedding(10, 3, sparse=True).half(), GradScaler("cpu", init_scale=1.0)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
    scaler.scale((embedding(torch.tensor([1, 1])) * 40000).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 0.5


def test_a_disabled_scaler_passes_everything_through():
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


class Wrapper:
    """A wrapper like Lookahead, which forwards reads of attributes that it lacks to the inner optimizer."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def step(self):
        return self.inner.step()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", [AdamW, torch.optim.AdamW])
def test_an_optimizer_in_a_wrapper_is_checked_and_unscaled(kind, fused):
    param = torch.nn.Parameter(torch.ones(2))
    alone = torch.nn.Parameter(torch.ones(2))
    inner, reference = (kind([it], lr=0.1, eps=1.0, fused=fused) for it in (param, alone))
    wrapped, scaler = Wrapper(inner), GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))

    param.grad = torch.tensor([1.0, math.inf])
    scaler.step(wrapped)
    scaler.update()
    assert torch.equal(param, alone)
    assert scaler.get_scale() == 2.0

    param.grad, alone.grad = torch.tensor([1.0, 2.0]), torch.tensor([0.5, 1.0])
    scaler.step(wrapped)
    reference.step()
    assert torch.equal(param, alone)
    assert "_step_supports_amp_scaling" not in vars(wrapped)


@pytest.mark.parametrize("bad", [True, None, "8", torch.ones(2), torch.ones((), requires_grad=True)], ids=str)
def test_a_new_scale_that_is_no_number_is_refused(bad):
    scaler = GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(AssertionError, match=r"new_scale should be a float or a 1-element|No inf checks were recorded"):
        scaler.update(bad)
    assert scaler.get_scale() == 2.0**16


class Unhashable:
    """An optimizer that can't be hashed, like a dataclass that compares by its fields."""

    __hash__ = None

    def __init__(self, optimizer):
        self.param_groups, self._optimizer = optimizer.param_groups, optimizer

    def step(self):
        if any(param.grad is None for param in self.param_groups[0]["params"]):
            raise KeyError
        self._optimizer.step()


class Slotted:
    """An optimizer with __slots__, which allows no other attributes and no weak reference."""

    __slots__ = ("_optimizer", "param_groups")
    __init__, step = Unhashable.__init__, Unhashable.step


@pytest.mark.parametrize("kind", [Unhashable, Slotted])
def test_unhashable_and_slotted_optimizers_are_scaled_as_by_torch(kind):
    results = []
    for scaler_kind in (GradScaler, torch.amp.GradScaler):
        scaler, models = scaler_kind("cpu", **INIT), [network(), network(seed=2)]
        optimizers = [kind(torch.optim.SGD(model.parameters(), lr=0.1)) for model in models]
        for seed in range(4):
            for model, optimizer in zip(models, optimizers, strict=True):
                backward(model, seed, scaler.scale(torch.ones(())).item())
                model[0].bias.grad[0] *= float("inf") if seed == 1 and model is models[1] else 1
                scaler.step(optimizer)
            scaler.update()
        results.append((list(models[0].parameters()), list(models[1].parameters()), scaler.get_scale()))
        if scaler_kind is GradScaler:
            assert [it.name for it in scaler.overflow_report(models[1]).culprits] == ["0.bias"]
            copy.deepcopy(scaler)
            models[0][0].bias.grad = None
            with pytest.raises(KeyError):
                scaler.step(optimizers[0])
            del optimizer, optimizers
            assert len(scaler._ledgers._entries) == (0 if kind is Unhashable else 2)
    torch.testing.assert_close(*results, rtol=0, atol=0)


FUSED = partial(torch.optim.AdamW, fused=True)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        *((make, "_unscale_grads_") for make in (AdamW, FUSED, torch.optim.AdamW)),
        *((make, "_check_inf_per_device") for make in (AdamW, FUSED)),  # only optimizers that unscale in their step
    ],
)
def test_a_subclass_that_looks_for_infs_itself_decides(make, name):
    """Such a subclass may learn of other ranks' infs, for example."""
    calls = []

    def look(self, *arguments):
        found_infs = getattr(GradScaler, name)(self, *arguments)
        calls.append(name)
        for found_inf in found_infs.values():
            found_inf.fill_(1)
        return found_infs

    scaler = type("Subclass", (GradScaler,), {name: look})("cpu", init_scale=4.0)
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = make([weight])
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert (calls, weight.tolist(), scaler.get_scale()) == ([name], [1.0, 1.0], 2.0)


@pytest.mark.parametrize("package", [torch.amp, amp], ids=["torch", "mpkernels"])
def test_a_scale_that_is_not_the_scalers_can_be_taken_off(package):
    """torch's own tests pass a scale to a scaler that has none yet."""
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.tensor([4.0, math.inf])
    found = package.GradScaler("cpu")._unscale_grads_(AdamW([weight]), torch.full((1,), 0.25), torch.zeros(1), False)
    assert (weight.grad.tolist(), found[weight.device].item()) == ([1.0, math.inf], 1.0)


def test_a_found_inf_that_was_left_on_the_optimizer_is_ignored():
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer, scaler = AdamW([weight]), GradScaler("cpu", init_scale=4.0)
    optimizer.found_inf = torch.ones(())
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert weight[0] < 1
    assert scaler.get_scale() == 4.0
    assert not hasattr(optimizer, "found_inf")


@pytest.mark.parametrize("make", [AdamW, FUSED])
def test_a_subclass_finds_a_grad_that_overflows_when_unscaled(make):
    """1e38 is finite, but not once a scale of 2^-20 is taken off."""

    class Subclass(GradScaler):
        def _unscale_grads_(self, *arguments):
            return super()._unscale_grads_(*arguments)

    scaler = Subclass("cpu", init_scale=2.0**-20)
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = make([weight])
    weight.grad = torch.full((2,), 1e38)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    scaler.update()
    assert (weight.tolist(), scaler.get_scale()) == ([1.0, 1.0], 2.0**-21)
