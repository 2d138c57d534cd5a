"""A master is used only for the weight that it was made from, after loads, copies and writes in any order."""

import copy
import pickle
from contextlib import nullcontext

import pytest
import torch

from mpkernels.amp import to_full, to_mixed
from mpkernels.optim import AdamW
from mpkernels.optim.masters import true_weight
from tests.hard_grads import same_bits
from tests.networks import B16, F16, backward, network, train
from tests.optim.optimizers import true_weights

SCHEMES = ["split", "fp32"]


def step_without_moving(model, optimizer):
    """Take a step that moves nothing."""
    for group in optimizer.param_groups:
        group |= {"lr": 0.0, "weight_decay": 0.0}
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("saved_scheme", SCHEMES)
@pytest.mark.parametrize("dtype", [B16, F16], ids=str)
@pytest.mark.parametrize("model_first", [True, False])
def test_model_and_optimizer_load_in_any_order(target, scheme, saved_scheme, dtype, model_first):
    source = network(dtype, target.device)
    train(source, optimizer := AdamW(source.parameters(), lr=1e-2, master=saved_scheme), 3)
    checkpoint = copy.deepcopy((source.state_dict(), optimizer.state_dict()))
    resumed = network(dtype, target.device, seed=7)
    other = AdamW(resumed.parameters(), lr=1e-2, master=scheme)
    if model_first:
        resumed.load_state_dict(checkpoint[0])
    other.load_state_dict(checkpoint[1])
    resumed.load_state_dict(checkpoint[0])
    before = true_weights(source, optimizer)
    step_without_moving(resumed, other)
    for was, now in zip(before, true_weights(resumed, other), strict=True):
        if scheme == "split" and saved_scheme == "fp32" and dtype == F16:
            assert ((was - now).abs() <= 2**-40).all()  # csrc/step/split.h
        else:
            assert same_bits(was, now)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_loaded_state_without_a_master_gets_one_of_the_weight_loaded_later(target, scheme):
    weight = torch.nn.Parameter(torch.full((3,), 7.0, dtype=B16, device=target.device))
    fp32 = torch.nn.Parameter(torch.ones(3, device=target.device))
    fp32.grad = torch.ones_like(fp32)
    (torchs := torch.optim.AdamW([fp32])).step()
    optimizer = AdamW([weight], lr=0.0, master=scheme)
    optimizer.load_state_dict(torchs.state_dict())
    weight.data.fill_(1.0)
    weight.grad = torch.ones_like(weight)
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert weight.tolist() == [1.0] * 3


def zero(weight):
    with torch.no_grad():
        weight.zero_()


def zero_through_data(weight):
    weight.data.zero_()


@pytest.mark.parametrize("write", [zero, zero_through_data], ids=lambda it: it.__name__)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights_written_after_a_load_win_with_one_warning(target, scheme, write):
    source = network(B16, target.device)
    train(source, optimizer := AdamW(source.parameters(), lr=1e-2, master="fp32"), 3)
    other = AdamW(source.parameters(), lr=1e-2, master=scheme)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    kept = [param.detach().clone() for param in source.parameters()]
    for param in list(source.parameters())[:2]:
        write(param)
    with pytest.warns(UserWarning, match="AdamW: 2 parameters are not the weights that the loaded masters") as caught:
        step_without_moving(source, other)
    assert len(caught) == 1
    step_without_moving(source, other)  # doesn't warn again
    for i, (param, master) in enumerate(zip(source.parameters(), true_weights(source, other), strict=True)):
        assert torch.equal(param, kept[i] * (i >= 2))
        assert torch.equal(master.to(B16), param)


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))], ids=["copy", "pickle"]
)
def test_a_copy_of_a_loaded_optimizer_warns_of_a_weight_written_later(duplicate):
    source = network(B16)
    train(source, optimizer := AdamW(source.parameters(), lr=1e-2, master="fp32"), 3)
    other = AdamW(source.parameters(), lr=1e-2, master="fp32")
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    twin, again = duplicate((source, other))
    zero(twin[0].weight)
    with pytest.warns(UserWarning, match="AdamW: 1 parameters are not the weights that the loaded masters"):
        step_without_moving(twin, again)
    assert (again.state[twin[0].weight]["master"] == 0).all()


def test_a_nan_in_a_weight_is_not_taken_for_another_weight():
    """NaN isn't equal to itself, yet the loaded master was made for this weight, by a training without the guard."""
    weight = torch.nn.Parameter(torch.tensor([torch.nan, 1.0], dtype=B16))
    weight.grad = torch.ones_like(weight)
    optimizer = AdamW([weight], master="fp32", guard=False)
    optimizer.step()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.step()  # a warning would be an error


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("value", [1.0, 1 + 2**-7])
def test_a_loaded_master_halfway_between_two_weights_belongs_to_both(scheme, value):
    """A copy of fp32 rounds to the even one, a split master to the larger one."""
    weight = torch.nn.Parameter(torch.full((3,), value, dtype=B16))
    weight.grad = torch.zeros_like(weight)
    optimizer = AdamW([weight], lr=0.0, master="fp32")
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["master"].fill_(1 + 2**-8)
    other = AdamW([weight], lr=0.0, master=scheme)
    other.load_state_dict(saved)
    other.step()  # a warning would be an error
    assert (true_weight(weight, other.state[weight]) == 1 + 2**-8).all()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_released_step_warns_of_a_weight_written_after_a_load(scheme):
    weight = torch.nn.Parameter(torch.ones(3, dtype=B16))
    options = {"lr": 0.0, "weight_decay": 0.0, "guard": False}
    optimizer, other = AdamW([weight], master="fp32", **options), AdamW([weight], master=scheme, **options)
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


def saved_and_loaded(model, optimizer):
    other = network(B16)
    other.load_state_dict(model.state_dict())
    again = AdamW(other.parameters(), master=optimizer.master)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return other, again


@pytest.mark.parametrize("duplicate", [copied, pickled, saved_and_loaded], ids=lambda it: it.__name__)
@pytest.mark.parametrize("writes_first", [True, False])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_write_reaches_the_master_of_a_copy(scheme, writes_first, duplicate):
    """A saved master has the write, too, for readers of checkpoints that don't compare it with the weight."""
    model = network(B16)
    train(model, optimizer := AdamW(model.parameters(), lr=1e-2, master=scheme, guard=False), 2)
    if writes_first:
        zero(model[0].weight)
        if scheme == "fp32":
            assert (optimizer.state_dict()["state"][0]["master"] == 0).all()
    twin, other = duplicate(model, optimizer)
    if not writes_first:
        with torch.no_grad():
            twin[0].weight.zero_()
    if not writes_first and duplicate is saved_and_loaded and scheme == "fp32":
        with pytest.warns(UserWarning, match="AdamW: 1 parameters are not the weights"):
            step_without_moving(twin, other)
    else:
        step_without_moving(twin, other)
    assert (twin[0].weight == 0).all()
    assert (true_weights(twin, other)[0].abs() < 1e-30).all()


def test_a_state_dict_between_two_loads_changes_no_master():
    source = network(B16)
    train(source, optimizer := AdamW(source.parameters(), lr=1e-2, master="fp32"), 3)
    resumed = network(B16, seed=7)
    other = AdamW(resumed.parameters(), master="fp32")
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    other.state_dict()
    resumed.load_state_dict(source.state_dict())
    before = true_weights(source, optimizer)
    step_without_moving(resumed, other)
    assert all(map(same_bits, before, true_weights(resumed, other)))


def test_remainders_are_saved_in_their_parameters_dtype_and_load_as_int16_too():
    for dtype in (B16, F16):
        model = network(dtype)
        train(model, optimizer := AdamW(model.parameters(), lr=1e-2), 3)
        saved = copy.deepcopy(optimizer.state_dict())
        for number, param in enumerate(model.parameters()):
            assert saved["state"][number]["remainder"].dtype == dtype
            remainder = saved["state"][number]["remainder"].view(torch.int16)  # as the optimizer holds it
            assert same_bits(remainder, optimizer.state[param]["remainder"])
            saved["state"][number]["remainder"] = remainder
        before = true_weights(model, optimizer)
        other = AdamW(model.parameters())
        other.load_state_dict(saved)
        step_without_moving(model, other)
        assert all(map(same_bits, before, true_weights(model, other)))


@pytest.mark.parametrize(
    ("scheme", "key", "got"),
    [("split", "remainder", torch.float32), ("split", "remainder", F16), ("fp32", "master", B16)],
    ids=str,
)
def test_a_master_that_comes_back_in_another_dtype_is_rebuilt_with_a_warning(scheme, key, got):
    """A remainder of bf16 means nothing in fp16, and torch's own load_state_dict would have rounded an fp32 master."""
    model = network(B16)
    train(model, optimizer := AdamW(model.parameters(), master=scheme), 2)
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        state[key] = state[key].to(got)
    with pytest.warns(UserWarning, match=f"{key} came back as {got}, not as one of torch.bfloat16's; rebuilt"):
        optimizer.load_state_dict(saved)
    step_without_moving(model, optimizer)
    for param, master in zip(model.parameters(), true_weights(model, optimizer), strict=True):
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


def test_a_write_wins_over_a_loaded_master_whose_parameter_had_no_grad_yet(target):
    """After the load another parameter steps, somebody writes to this one, and then it gets its first grad."""
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
def test_to_full_takes_a_weight_that_was_written_by_hand(how):
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
