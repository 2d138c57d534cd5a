"""A master is used only for the weight that it was made from, after loads, copies and writes in any order."""

import copy
import pickle
from contextlib import nullcontext

import pytest
import torch

from mpkernels.amp import to_full, to_mixed
from mpkernels.optim import AdamW
from tests.hard_grads import same_bits
from tests.networks import B16, F16, backward, network, train
from tests.optim.optimizers import weights_of

SCHEMES = ["split", "fp32"]


def rest(model, optimizer):
    """Take a step that moves nothing."""
    for group in optimizer.param_groups:
        group |= {"lr": 0.0, "weight_decay": 0.0}
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()


@pytest.mark.parametrize("own", SCHEMES)
@pytest.mark.parametrize("saved", SCHEMES)
@pytest.mark.parametrize("dtype", [B16, F16], ids=str)
@pytest.mark.parametrize("model_first", [True, False])
def test_model_and_optimizer_load_in_any_order(target, own, saved, dtype, model_first):
    source = network(dtype, target.device)
    train(source, optimizer := AdamW(source.parameters(), lr=1e-2, master=saved), 3)
    checkpoint = copy.deepcopy((source.state_dict(), optimizer.state_dict()))
    resumed = network(dtype, target.device, seed=7)
    other = AdamW(resumed.parameters(), lr=1e-2, master=own)
    if model_first:
        resumed.load_state_dict(checkpoint[0])
    other.load_state_dict(checkpoint[1])
    resumed.load_state_dict(checkpoint[0])
    before = weights_of(source, optimizer)
    rest(resumed, other)
    for was, now in zip(before, weights_of(resumed, other), strict=True):
        if own == "split" and saved == "fp32" and dtype == F16:
            assert ((was - now).abs() <= 2**-40).all()  # csrc/step/split.h
        else:
            assert same_bits(was, now)


@pytest.mark.parametrize("own", SCHEMES)
def test_a_state_without_a_master_gets_that_of_the_weight_loaded_later(target, own):
    weight = torch.nn.Parameter(torch.full((3,), 7.0, dtype=B16, device=target.device))
    fp32 = torch.nn.Parameter(torch.ones(3, device=target.device))
    fp32.grad = torch.ones_like(fp32)
    (torchs := torch.optim.AdamW([fp32])).step()
    optimizer = AdamW([weight], lr=0.0, master=own)
    optimizer.load_state_dict(torchs.state_dict())
    weight.data.fill_(1.0)
    weight.grad = torch.ones_like(weight)
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert weight.tolist() == [1.0] * 3


def zero(weight):
    with torch.no_grad():
        weight.zero_()


def zero_unseen(weight):
    weight.data.zero_()


@pytest.mark.parametrize("write", [zero, zero_unseen], ids=lambda it: it.__name__)
@pytest.mark.parametrize("own", SCHEMES)
def test_weights_written_after_a_load_win_with_one_warning(target, own, write):
    source = network(B16, target.device)
    train(source, optimizer := AdamW(source.parameters(), lr=1e-2, master="fp32"), 3)
    other = AdamW(source.parameters(), lr=1e-2, master=own)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    kept = [param.detach().clone() for param in source.parameters()]
    for param in list(source.parameters())[:2]:
        write(param)
    with pytest.warns(UserWarning, match="AdamW: 2 parameters are not the weights that the loaded masters") as it:
        rest(source, other)
    assert len(it) == 1
    rest(source, other)  # doesn't warn again
    for i, (param, master) in enumerate(zip(source.parameters(), weights_of(source, other), strict=True)):
        assert torch.equal(param, kept[i] * (i >= 2))
        assert torch.equal(master.to(B16), param)


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))], ids=["copy", "pickle"]
)
def test_a_copy_made_before_the_first_step_warns_as_well(duplicate):
    source = network(B16)
    train(source, optimizer := AdamW(source.parameters(), lr=1e-2, master="fp32"), 3)
    other = AdamW(source.parameters(), lr=1e-2, master="fp32")
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    twin, again = duplicate((source, other))
    zero(twin[0].weight)
    with pytest.warns(UserWarning, match="AdamW: 1 parameters are not the weights that the loaded masters"):
        rest(twin, again)
    assert (again.state[twin[0].weight]["master"] == 0).all()


def test_a_weight_that_is_nan_is_no_other_weight():
    """A training without the guard may have saved it so: the master that is loaded was made for it."""
    weight = torch.nn.Parameter(torch.tensor([torch.nan, 1.0], dtype=B16))
    weight.grad = torch.ones_like(weight)
    optimizer = AdamW([weight], master="fp32", guard=False)
    optimizer.step()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.step()  # a warning would be an error


@pytest.mark.parametrize("own", SCHEMES)
def test_a_released_step_warns_as_well(own):
    weight = torch.nn.Parameter(torch.ones(3, dtype=B16))
    options = {"lr": 0.0, "weight_decay": 0.0, "guard": False}
    optimizer, other = AdamW([weight], master="fp32", **options), AdamW([weight], master=own, **options)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    weight.grad = None
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    zero(weight)
    other.release_grads()
    with pytest.warns(UserWarning, match="AdamW: 1 parameters are not the weights that the loaded masters"):
        weight.sum().backward()
    assert (weight == 0).all()


def copied(model, optimizer):
    return copy.deepcopy((model, optimizer))


def pickled(model, optimizer):
    return pickle.loads(pickle.dumps((model, optimizer)))


def saved(model, optimizer):
    other = network(B16)
    other.load_state_dict(model.state_dict())
    again = AdamW(other.parameters(), master=optimizer.master)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return other, again


@pytest.mark.parametrize("duplicate", [copied, pickled, saved], ids=lambda it: it.__name__)
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("own", SCHEMES)
def test_a_write_reaches_the_master_of_a_copy(own, before, duplicate):
    """Also in what is saved, for readers that don't compare."""
    model = network(B16)
    train(model, optimizer := AdamW(model.parameters(), lr=1e-2, master=own, guard=False), 2)
    if before:
        zero(model[0].weight)
        if own == "fp32":
            assert (optimizer.state_dict()["state"][0]["master"] == 0).all()
    twin, other = duplicate(model, optimizer)
    if not before:
        with torch.no_grad():
            twin[0].weight.zero_()
    if not before and duplicate is saved and own == "fp32":
        with pytest.warns(UserWarning, match="AdamW: 1 parameters are not the weights"):
            rest(twin, other)
    else:
        rest(twin, other)
    assert (twin[0].weight == 0).all()
    assert (weights_of(twin, other)[0].abs() < 1e-30).all()


def test_a_state_dict_between_two_loads_changes_no_master():
    source = network(B16)
    train(source, optimizer := AdamW(source.parameters(), lr=1e-2, master="fp32"), 3)
    resumed = network(B16, seed=7)
    other = AdamW(resumed.parameters(), master="fp32")
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    other.state_dict()
    resumed.load_state_dict(source.state_dict())
    before = weights_of(source, optimizer)
    rest(resumed, other)
    assert all(map(same_bits, before, weights_of(resumed, other)))


def test_remainders_travel_in_their_parameters_dtype():
    for dtype in (B16, F16):
        model = network(dtype)
        train(model, optimizer := AdamW(model.parameters(), lr=1e-2), 3)
        saved = copy.deepcopy(optimizer.state_dict())
        for number, param in enumerate(model.parameters()):
            assert saved["state"][number]["remainder"].dtype == dtype
            saved["state"][number]["remainder"] = saved["state"][number]["remainder"].view(torch.int16)  # as it was
            assert same_bits(saved["state"][number]["remainder"], optimizer.state[param]["remainder"])
        before = weights_of(model, optimizer)
        other = AdamW(model.parameters())
        other.load_state_dict(saved)
        rest(model, other)
        assert all(map(same_bits, before, weights_of(model, other)))


@pytest.mark.parametrize(
    ("own", "key", "got"),
    [("split", "remainder", torch.float32), ("split", "remainder", F16), ("fp32", "master", B16)],
    ids=str,
)
def test_a_master_that_comes_back_in_another_dtype_is_rebuilt_with_a_warning(own, key, got):
    """bf16's remainders are no fp16's, and torch's own load_state_dict rounds a copy."""
    model = network(B16)
    train(model, optimizer := AdamW(model.parameters(), master=own), 2)
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        state[key] = state[key].to(got)
    with pytest.warns(UserWarning, match=f"AdamW: {key} came back as {got}; rebuilt from the weight"):
        optimizer.load_state_dict(saved)
    rest(model, optimizer)
    for param, master in zip(model.parameters(), weights_of(model, optimizer), strict=True):
        assert torch.equal(master, param.detach().float())


@pytest.mark.exhaustive
def test_a_write_is_seen_by_a_compiled_step():
    model = network(B16)
    optimizer = AdamW(model.parameters(), lr=torch.tensor(0.0), weight_decay=0.0, master="fp32", guard=False)
    step = torch.compile(optimizer.step, backend="eager", fullgraph=True)
    for _ in range(2):
        backward(model, 1)
        step()
    zero(model[0].weight)
    backward(model, 1)
    step()
    assert (model[0].weight == 0).all()


def test_a_master_that_waits_for_its_parameters_first_grad(target):
    """Other parameters step meanwhile, and somebody writes to it."""
    _, second = weights = [torch.nn.Parameter(torch.ones(3, dtype=B16, device=target.device)) for _ in range(2)]
    source = AdamW(weights, lr=1e-3, master="fp32")
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    source.step()
    optimizer = AdamW(weights)
    optimizer.load_state_dict(source.state_dict())
    optimizer.param_groups[0].update(lr=0.0, weight_decay=0.0)
    second.grad = None
    optimizer.step()
    with torch.no_grad():
        second.fill_(7.0)
    second.grad = torch.ones_like(second)
    optimizer.step()
    assert second.tolist() == [7.0] * 3


@pytest.mark.parametrize("how", ["written", "loaded later"])
def test_to_full_takes_what_was_written(how):
    model = network()
    train(model, optimizer := AdamW(model.parameters(), lr=1e-2, master="fp32"), 2)
    to_mixed(model, B16, optimizer=optimizer)
    if how == "loaded later":
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    zero(model[0].weight)
    with pytest.warns(UserWarning, match="1 parameters") if how == "loaded later" else nullcontext():
        to_full(model, optimizer)
    assert (model[0].weight == 0).all()
    assert model[0].weight.dtype == torch.float32
