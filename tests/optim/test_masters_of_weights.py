"""A master is used only for the weight that it was made from, after loads, copies and writes in any order."""

import copy
from contextlib import nullcontext

import pytest
import torch

from mpkernels.amp import to_full, to_mixed
from mpkernels.optim import AdamW, Masters
from mpkernels.optim.masters import true_weight
from tests.hard_grads import same_bits
from tests.networks import B16, F16, backward, network, train
from tests.optim.optimizers import Tuned, all_same_bits, each_duplicate, true_weights

SCHEMES = ["split", "fp32"]
WITH_MASTERS = [*SCHEMES, "Masters"]
OTHER_WEIGHTS = "^(Tuned|Masters): {} parameters are not the weights that the loaded masters"


def made(scheme, params, lr=1e-2, weight_decay=0.0, **options):
    """Return a subclass of our AdamW with masters of this scheme, or Masters around torch's."""
    if scheme == "Masters":
        return Masters(torch.optim.AdamW(params, lr, weight_decay=weight_decay), **options)
    return Tuned(params, lr, weight_decay=weight_decay, master=scheme, **options)


def trained(scheme, dtype=B16, device="cpu", steps=3):
    model = network(dtype, device)
    train(model, optimizer := made(scheme, model.parameters()), steps)
    return model, optimizer


def one_weight(scheme, value=1.0, **options):
    """Return a weight, and its optimizer after a step that has not moved it."""
    weight = torch.nn.Parameter(torch.full((3,), value, dtype=B16))
    weight.grad = torch.zeros_like(weight)
    (optimizer := made(scheme, [weight], lr=0.0, **options)).step()
    return weight, optimizer


def loaded(source, scheme, params, **options):
    """Return an optimizer that has loaded another's states."""
    optimizer = made(scheme, params, **options)
    optimizer.load_state_dict(copy.deepcopy(source.state_dict()))
    return optimizer


def step_without_moving(model, optimizer):
    for group in optimizer.param_groups:
        group |= {"lr": 0.0, "weight_decay": 0.0}
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()


@pytest.mark.parametrize("scheme", WITH_MASTERS)
@pytest.mark.parametrize("saved_scheme", WITH_MASTERS)
@pytest.mark.parametrize("dtype", [B16, F16], ids=str)
@pytest.mark.parametrize("model_first", [True, False])
def test_model_and_optimizer_load_in_any_order(target, scheme, saved_scheme, dtype, model_first):
    source, optimizer = trained(saved_scheme, dtype, target.device)
    resumed = network(dtype, target.device, seed=7)
    if model_first:
        resumed.load_state_dict(source.state_dict())
    other = loaded(optimizer, scheme, resumed.parameters())
    resumed.load_state_dict(source.state_dict())
    before = true_weights(source, optimizer)
    step_without_moving(resumed, other)
    for was, now in zip(before, true_weights(resumed, other), strict=True):
        if scheme != "fp32" and saved_scheme == "fp32" and dtype == F16:
            assert ((was - now).abs() <= 2**-40).all()  # csrc/step/split.h
        else:
            assert same_bits(was, now)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_loaded_state_without_a_master_gets_one_of_the_weight_loaded_later(target, scheme):
    weight = torch.nn.Parameter(torch.full((3,), 7.0, dtype=B16, device=target.device))
    fp32 = torch.nn.Parameter(torch.ones(3, device=target.device))
    fp32.grad = torch.ones_like(fp32)
    (torchs := torch.optim.AdamW([fp32])).step()
    optimizer = loaded(torchs, scheme, [weight])
    weight.data.fill_(1.0)
    step_without_moving(torch.nn.ParameterList([weight]), optimizer)
    assert weight.tolist() == [1.0] * 3


def zero(weight):
    with torch.no_grad():
        weight.zero_()


def zero_through_data(weight):
    weight.data.zero_()


@pytest.mark.parametrize("write", [zero, zero_through_data], ids=lambda it: it.__name__)
@pytest.mark.parametrize("scheme", WITH_MASTERS)
def test_weights_written_after_a_load_win_with_one_warning(target, scheme, write):
    source, optimizer = trained("fp32", B16, target.device)
    other = loaded(optimizer, scheme, source.parameters())
    kept = [param.detach().clone() for param in source.parameters()]
    for param in list(source.parameters())[:2]:
        write(param)
    with pytest.warns(UserWarning, match=OTHER_WEIGHTS.format(2)) as caught:
        step_without_moving(source, other)
    assert len(caught) == 1
    step_without_moving(source, other)  # doesn't warn again
    for i, (param, master) in enumerate(zip(source.parameters(), true_weights(source, other), strict=True)):
        assert torch.equal(param, kept[i] * (i >= 2))
        assert torch.equal(master.to(B16), param)


@each_duplicate
def test_a_copy_of_a_loaded_optimizer_warns_of_a_weight_written_later(duplicate):
    source, optimizer = trained("fp32")
    twin, again = duplicate((source, loaded(optimizer, "fp32", source.parameters())))
    zero(twin[0].weight)
    with pytest.warns(UserWarning, match=OTHER_WEIGHTS.format(1)):
        step_without_moving(twin, again)
    assert (again.state[twin[0].weight]["master"] == 0).all()


def test_a_nan_in_a_weight_is_not_taken_for_another_weight():
    """NaN isn't equal to itself, yet the loaded master was made for this weight, by a training without the guard."""
    weight, optimizer = one_weight("fp32", torch.nan, guard=False)
    loaded(optimizer, "fp32", [weight], guard=False).step()  # a warning would be an error


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("value", [1.0, 1 + 2**-7])
def test_a_loaded_master_halfway_between_two_weights_belongs_to_both(scheme, value):
    """A copy of fp32 rounds to the even one, a split master to the larger one."""
    weight, optimizer = one_weight("fp32", value)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["master"].fill_(1 + 2**-8)
    other = made(scheme, [weight])
    other.load_state_dict(saved)
    step_without_moving(torch.nn.ParameterList([weight]), other)  # a warning would be an error
    assert (true_weight(weight, other.state[weight]) == 1 + 2**-8).all()
    assert (weight == (1 + 2**-7 if scheme == "split" else 1)).all()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_released_step_warns_of_a_weight_written_after_a_load(scheme):
    weight, optimizer = one_weight("fp32", guard=False)
    weight.grad = None
    other = loaded(optimizer, scheme, [weight], guard=False)
    zero(weight)
    other.release_grads()
    with pytest.warns(UserWarning, match=OTHER_WEIGHTS.format(1)):
        weight.sum().backward()
    assert (weight == 0).all()


def test_a_state_dict_between_two_loads_changes_no_master():
    source, optimizer = trained("fp32")
    resumed = network(B16, seed=7)
    other = loaded(optimizer, "fp32", resumed.parameters())
    other.state_dict()
    resumed.load_state_dict(source.state_dict())
    before = true_weights(source, optimizer)
    step_without_moving(resumed, other)
    assert all_same_bits(before, true_weights(resumed, other))


@pytest.mark.parametrize("dtype", [B16, F16], ids=str)
def test_remainders_are_saved_in_their_parameters_dtype_and_load_as_int16_too(dtype):
    model, optimizer = trained("split", dtype)
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
    assert all_same_bits(before, true_weights(model, other))


@pytest.mark.parametrize(
    ("scheme", "key", "got"),
    [("split", "remainder", torch.float32), ("split", "remainder", F16), ("fp32", "master", B16)],
    ids=str,
)
def test_a_master_that_comes_back_in_another_dtype_is_rebuilt_with_a_warning(scheme, key, got):
    """A remainder of bf16 means nothing in fp16, and torch's own load_state_dict would have rounded an fp32 master."""
    model, optimizer = trained(scheme, steps=2)
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        state[key] = state[key].to(got)
    with pytest.warns(UserWarning, match=f"^Tuned: {key} came back as {got}, not as one of torch.bfloat16's; rebuilt"):
        optimizer.load_state_dict(saved)
    step_without_moving(model, optimizer)
    for param, master in zip(model.parameters(), true_weights(model, optimizer), strict=True):
        assert torch.equal(master, param.detach().float())


@pytest.mark.exhaustive
def test_a_write_is_seen_by_a_compiled_step():
    model = network(B16)
    optimizer = made("fp32", model.parameters(), torch.tensor(0.0), guard=False)
    step = torch.compile(optimizer.step, backend="eager", fullgraph=True)
    for is_written in (False, False, True):
        if is_written:
            zero(model[0].weight)
        backward(model, 1)
        step()
    assert (model[0].weight == 0).all()


def test_a_write_wins_over_a_loaded_master_whose_parameter_had_no_grad_yet(target):
    """After the load another parameter steps, somebody writes to this one, and then it gets its first grad."""
    _, second = weights = [torch.nn.Parameter(torch.ones(3, dtype=B16, device=target.device)) for _ in range(2)]
    source = made("fp32", weights, 1e-3)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    source.step()
    optimizer = loaded(source, "split", weights)
    optimizer.param_groups[0]["lr"] = 0.0
    second.grad = None
    optimizer.step()
    with torch.no_grad():
        second.fill_(7.0)
    second.grad = torch.ones_like(second)
    optimizer.step()
    assert second.tolist() == [7.0] * 3


@pytest.mark.parametrize("how", ["written", "loaded later"])
def test_to_full_takes_a_weight_that_was_written_by_hand(how):
    model, optimizer = trained("fp32", torch.float32, steps=2)
    to_mixed(model, B16, optimizer=optimizer)
    if how == "loaded later":
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    zero(model[0].weight)
    with pytest.warns(UserWarning, match="1 parameters") if how == "loaded later" else nullcontext():
        to_full(model, optimizer)
    assert (model[0].weight == 0).all()
    assert model[0].weight.dtype == torch.float32


@pytest.mark.parametrize("through", ["itself", "data", "detach"])
@pytest.mark.parametrize("released", [False, True])
@pytest.mark.parametrize("scheme", WITH_MASTERS)
def test_a_write_to_a_weight_reaches_its_master(target, scheme, released, through):
    """Nothing else in the master changes. A weight may lack a grad in the step after the write."""
    weights = [torch.nn.Parameter(torch.ones(3, dtype=B16, device=target.device)) for _ in range(2)]
    optimizer = made(scheme, weights, guard=False)
    if released:
        optimizer.release_grads()
    for lr, stepped in ((1e-3, weights), (0.0, weights[:1]), (0.0, weights)):
        optimizer.param_groups[0]["lr"] = lr
        sum(weight.sum() for weight in stepped).backward()
        optimizer.step()
        optimizer.zero_grad()
        if lr:
            before = weights[0].tolist()
            with torch.no_grad():
                for weight in weights:
                    {"itself": weight, "data": weight.data, "detach": weight.detach()}[through][1] = 5.0
            saved = optimizer.state_dict()["state"][0]  # for readers of checkpoints that don't look at the weight
            assert scheme != "fp32" or saved["master"][1] == 5
    for weight, master in zip(weights, true_weights(torch.nn.ParameterList(weights), optimizer), strict=True):
        assert weight.tolist() == [before[0], 5.0, before[2]]
        kept = master.tolist()
        assert kept[0] == kept[2] == pytest.approx(1 - 1e-3, abs=1e-6)  # which bf16 rounds to 1
        assert kept[1] == pytest.approx(5, rel=2**-9)
