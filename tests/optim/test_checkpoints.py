"""Checkpoints of AdamW, Adam, SGD and Lion: what is refused, and what comes back as it was."""

import copy
import io

import pytest
import torch

from mpkernels.optim import SGD, Adam, AdamW, Lion
from tests.networks import B16, network, train
from tests.optim.optimizers import Tuned

I8 = torch.int8


def stepped(kind=AdamW, dtype=torch.float32, sizes=(3,), **options):
    weights = [torch.nn.Parameter(torch.ones(size, dtype=dtype)) for size in sizes]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer = kind(weights, **{"lr": 0.1, **options})
    optimizer.step()
    return weights, optimizer


def saved_and_loaded(optimizer):
    """Return a state_dict after saving it to a file and loading it with weights_only."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("amsgrad", [True, False])
def test_8_bit_moments_load_unchanged_also_those_of_an_empty_parameter(amsgrad):
    """max_exp_avg_sq, too, where amsgrad was on and is off."""
    params, optimizer = stepped(sizes=(0, 300), state_dtype=I8, amsgrad=True)
    optimizer.param_groups[0]["amsgrad"] = amsgrad
    other = AdamW(params, state_dtype=I8, amsgrad=True)
    other.load_state_dict(saved_and_loaded(optimizer))
    torch.testing.assert_close(dict(other.state), dict(optimizer.state), rtol=0, atol=0)


def changed(**values):
    return lambda saved: {**saved, "state": {0: saved["state"][0] | values}}


def without(key):
    return lambda saved: {**saved, "state": {0: {name: it for name, it in saved["state"][0].items() if name != key}}}


LOADS = r"Tuned\.load_state_dict: "
MOMENTS_MISSING = LOADS + r"state\[0\] must have exp_avg and exp_avg_sq, got "
SHAPE = r"\] must have its parameter's shape \(3,\), got \(1,\)"  # copy_ would broadcast the one element
REFUSED = [
    (lambda _: None, TypeError, f"{LOADS}state_dict must be a dict, got NoneType$"),
    (lambda _: {"weight": 1}, ValueError, f"{LOADS}state_dict must have state and param_groups, got weight"),
    (lambda _: {}, ValueError, f"{LOADS}state_dict must have state and param_groups, got an empty dict"),
    (lambda saved: {**saved, "param_groups": {}}, TypeError, f"{LOADS}param_groups must be a list, got dict$"),
    (lambda saved: {**saved, "state": []}, TypeError, f"{LOADS}state must be a dict, got list$"),
    (changed(exp_avg=[1.0]), TypeError, rf"{LOADS}state\[0\]\['exp_avg'\] must be a tensor, got list$"),
    *(
        (changed(**{key: torch.ones(1)}), ValueError, rf"{LOADS}state\[0\]\['{key}'{SHAPE}")
        for key in ("exp_avg", "max_exp_avg_sq", "master")
    ),
    (without("exp_avg"), ValueError, MOMENTS_MISSING),
    (without("exp_avg_sq"), ValueError, MOMENTS_MISSING),
    (without("step"), ValueError, "Tuned: a state must have step, "),
]


@pytest.mark.parametrize(("spoil", "error", "text"), REFUSED)
def test_a_wrong_state_dict_is_refused_before_anything_changes(spoil, error, text):
    [weight], optimizer = stepped(Tuned, dtype=B16, amsgrad=True, master="fp32")
    saved, before = optimizer.state_dict(), dict(optimizer.state[weight])
    saved["param_groups"][0]["lr"] = 0.5
    with pytest.raises(error, match=f"^{text}"):
        optimizer.load_state_dict(spoil(saved))
    assert all(optimizer.state[weight][key] is value for key, value in before.items())
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert not optimizer._optimizer_load_state_dict_pre_hooks


@pytest.mark.parametrize(
    ("saves", "loads", "options", "text"),
    [
        # Lion would keep Adam's second moment and its betas, and SGD would miss its options only at the next step.
        (AdamW, Lion, {}, r"state\[0\] must "),
        (Adam, SGD, {}, r"state\[0\] must "),
        (SGD, Lion, {"momentum": 0.9}, r"state\[0\] must "),
        (Lion, SGD, {}, r"state\[0\] must "),
        (torch.optim.SGD, AdamW, {}, r"param_groups\[0\] must have betas, "),
        (SGD, AdamW, {}, r"param_groups\[0\] must have betas, "),
        (torch.optim.RMSprop, SGD, {}, r"param_groups\[0\] must have dampening, "),
        (torch.optim.Adagrad, SGD, {}, r"param_groups\[0\] must have momentum, "),
    ],
)
def test_another_rules_state_dict_is_refused_before_anything_changes(saves, loads, options, text):
    """Without states, the groups alone tell that another class has saved them."""
    _, optimizer = stepped(saves, **options)
    other, saved = loads([torch.nn.Parameter(torch.ones(3))], lr=0.5), optimizer.state_dict()
    for it in (saved, {**saved, "state": {}}) if "groups" in text else (saved,):
        with pytest.raises(ValueError, match=rf"^{loads.__name__}\.load_state_dict: {text}"):
            other.load_state_dict(it)
        assert (other.param_groups[0]["lr"], dict(other.state)) == (0.5, {})


@pytest.mark.parametrize("kind", [AdamW, SGD, Lion])
def test_groups_without_the_switches_of_later_versions_are_loaded(kind):
    """torch's older classes lacked some switches, and the class of Lion's authors has none."""
    [weight], optimizer = stepped(kind)
    saved = copy.deepcopy(kind([weight], lr=0.2).state_dict())
    group = saved["param_groups"][0]
    saved["param_groups"] = [{key: it for key, it in group.items() if not isinstance(it, bool | str | None)}]
    optimizer.load_state_dict(saved)
    optimizer.step()
    assert optimizer.param_groups[0]["lr"] == 0.2
    assert optimizer.param_groups[0]["maximize"] is False


def test_a_parameter_without_a_state_is_not_saved_and_an_empty_state_counts_as_none():
    """The state is a defaultdict, so reading a parameter's state makes an empty one."""
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer, again = AdamW(weights), AdamW(weights)
    assert optimizer.state_dict()["state"] == {}
    weights[0].grad = torch.ones(2)
    optimizer.step()
    assert set(optimizer.state_dict()["state"]) == {0}
    assert optimizer.state[weights[1]] == {}
    again.load_state_dict(optimizer.state_dict())
    weights[1].grad = torch.ones(2)
    again.step()
    assert [again.state[weight]["step"].item() for weight in weights] == [2, 1]


@pytest.mark.parametrize("amsgrad", [False, True])
def test_torch_can_load_8_bit_checkpoints(amsgrad):
    model = network()
    train(model, optimizer := AdamW(model.parameters(), lr=1e-2, state_dtype=I8, amsgrad=amsgrad), 5)
    saved = saved_and_loaded(optimizer)
    keys = {"step", "exp_avg", "exp_avg_sq"} | ({"max_exp_avg_sq"} if amsgrad else set())
    for state in saved["state"].values():
        assert {key: it.dtype for key, it in state.items()} == dict.fromkeys(keys, torch.float32)
    torchs = copy.deepcopy(model)
    theirs = torch.optim.AdamW(torchs.parameters(), lr=1e-2, amsgrad=amsgrad, foreach=False)
    theirs.load_state_dict(saved)
    for trained, its_optimizer in ((model, optimizer), (torchs, theirs)):
        train(trained, its_optimizer, 1, first=5)
    torch.testing.assert_close(list(torchs.parameters()), list(model.parameters()))


def test_8_bit_moments_load_into_a_parameter_of_another_layout():
    """Codes that are neighbours in memory share a scale; the parameter that loads them decides the order."""
    values = torch.randn(4, 6, 5, 5, generator=torch.Generator().manual_seed(0))
    plain, last = (
        torch.nn.Parameter(values.to(memory_format=it)) for it in (torch.contiguous_format, torch.channels_last)
    )
    optimizers = [AdamW([param], state_dtype=I8) for param in (plain, last)]
    plain.grad = values * values
    optimizers[0].step()
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    got, want = (optimizer.state_dict()["state"][0]["exp_avg"] for optimizer in reversed(optimizers))
    assert got.stride() == last.stride()
    torch.testing.assert_close(got, want, rtol=0, atol=want.abs().max().item() / 100)


def test_a_foreign_key_in_a_saved_state_is_kept():
    [weight], optimizer = stepped()
    optimizer.load_state_dict(changed(note=torch.ones(2))(optimizer.state_dict()))
    assert optimizer.state[weight]["note"].tolist() == [1.0, 1.0]
