"""AdamW's checkpoints: resumed to the bit, exchanged with torch's, never rounded."""

import copy
import io

import pytest
import torch

from mpkernels.ops.step.split import join
from mpkernels.optim import SGD, Adam, AdamW, Lion
from tests.networks import B16, network, train

I8 = torch.int8


def stepped(**options):
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    optimizer = AdamW([weight], **options)
    optimizer.step()
    return weight, optimizer


def saved_and_loaded(optimizer):
    """Return a state_dict after saving it to a file and loading it with weights_only."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_8_bit_moments_load_unchanged_also_those_of_an_empty_parameter():
    params = [torch.nn.Parameter(torch.ones(size)) for size in (0, 300)]
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer = AdamW(params, state_dtype=I8, amsgrad=True)
    optimizer.step()
    other = AdamW(params, state_dtype=I8, amsgrad=True)
    other.load_state_dict(saved_and_loaded(optimizer))
    torch.testing.assert_close(dict(other.state), dict(optimizer.state), rtol=0, atol=0)


@pytest.mark.parametrize("key", ["exp_avg", "max_exp_avg_sq", "master"])
def test_a_state_of_another_shape_is_refused_before_anything_changes(key):
    """copy_ would broadcast the one saved element over the whole state."""
    model = network(B16)
    train(model, optimizer := AdamW(model.parameters(), amsgrad=True, master="fp32"), 1)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][3][key] = saved["state"][3][key][:1]
    saved["param_groups"][0]["lr"] = 0.5
    text = rf"AdamW.load_state_dict: state\[3\]\['{key}'\] must have its parameter's shape \(30,\), got \(1,\)"
    with pytest.raises(ValueError, match=text):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 1e-3
    assert not optimizer._optimizer_load_state_dict_pre_hooks


def test_another_number_of_parameters_is_refused_in_torchs_words():
    weight, optimizer = stepped()
    with pytest.raises(ValueError, match="doesn't match the size of optimizer's group"):
        AdamW([torch.ones(2, 2, requires_grad=True), weight]).load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("missing", ["exp_avg", "exp_avg_sq", "step"])
def test_a_state_without_a_part_is_refused(missing):
    """Another optimizer's state, for example, would silently give moments of 0, or a count that begins anew."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = AdamW([weight])
    weight.grad = torch.ones(2)
    optimizer.step()
    saved = optimizer.state_dict()
    del saved["state"][0][missing]
    before = dict(optimizer.state[weight])
    moments_missing = r"AdamW.load_state_dict: state\[0\] must have exp_avg and exp_avg_sq, got "
    text = "AdamW: a state must have step, " if missing == "step" else moments_missing
    with pytest.raises(ValueError, match=text):
        optimizer.load_state_dict(saved)
    assert all(optimizer.state[weight][key] is value for key, value in before.items())


@pytest.mark.parametrize(("saved", "loads"), [(AdamW, Lion), (Adam, SGD), (SGD, Lion), (Lion, SGD)])
def test_another_rules_state_is_refused(saved, loads):
    """Lion would keep Adam's second moment and its betas, and SGD would miss its options only at the next step."""
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    optimizer = saved([weight], lr=0.1, **{"momentum": 0.9} if saved is SGD else {})
    optimizer.step()
    other = loads([weight], lr=0.5)
    with pytest.raises(ValueError, match=rf"{loads.__name__}.load_state_dict: state\[0\] must "):
        other.load_state_dict(optimizer.state_dict())
    assert (other.param_groups[0]["lr"], dict(other.state)) == (0.5, {})


@pytest.mark.parametrize("is_stepped", [False, True])
@pytest.mark.parametrize(
    ("saved", "loads", "missing"),
    [
        (torch.optim.SGD, AdamW, "betas"),
        (SGD, AdamW, "betas"),
        (torch.optim.RMSprop, SGD, "dampening"),
        (torch.optim.Adagrad, SGD, "momentum"),
    ],
)
def test_groups_that_lack_an_option_are_refused_before_anything_changes(saved, loads, missing, is_stepped):
    """Without states, the groups alone tell that another class has saved them."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = saved([weight], lr=0.1)
    if is_stepped:
        weight.grad = torch.ones(2)
        optimizer.step()
    other = loads([weight], lr=0.5)
    with pytest.raises(
        ValueError, match=rf"{loads.__name__}\.load_state_dict: param_groups\[0\] must have {missing}, "
    ):
        other.load_state_dict(optimizer.state_dict())
    assert (other.param_groups[0]["lr"], dict(other.state)) == (0.5, {})


@pytest.mark.parametrize("kind", [AdamW, SGD, Lion])
def test_groups_without_the_switches_of_later_versions_are_loaded(kind):
    """torch's older classes lacked some switches, and the class of Lion's authors has none."""
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    saved = copy.deepcopy(kind([weight], lr=0.1).state_dict())
    group = saved["param_groups"][0]
    saved["param_groups"] = [{key: it for key, it in group.items() if not isinstance(it, bool | str | None)}]
    optimizer = kind([weight])
    optimizer.load_state_dict(saved)
    optimizer.step()
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert optimizer.param_groups[0]["maximize"] is False


def spoilt(saved, key, value):
    return {**saved, "state": {**saved["state"], 0: {**saved["state"][0], key: value}}}


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda _: None, "state_dict must be a dict, got NoneType"),
        (lambda saved: {**saved, "param_groups": {}}, "param_groups must be a list, got dict"),
        (lambda saved: {**saved, "state": []}, "state must be a dict, got list"),
        (lambda saved: spoilt(saved, "exp_avg", [1.0]), r"state\[0\]\['exp_avg'\] must be a tensor, got list"),
    ],
)
def test_what_has_not_the_form_of_a_state_dict_is_refused(spoil, text):
    weight, optimizer = stepped()
    before = dict(optimizer.state[weight])
    with pytest.raises(TypeError, match=rf"^AdamW\.load_state_dict: {text}$"):
        optimizer.load_state_dict(spoil(optimizer.state_dict()))
    assert all(optimizer.state[weight][key] is value for key, value in before.items())


def test_an_empty_state_counts_as_no_state():
    """The state is a defaultdict, so reading a parameter's state makes an empty one."""
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = AdamW(weights)
    weights[0].grad = torch.ones(2)
    optimizer.step()
    assert optimizer.state[weights[1]] == {}
    again = AdamW(weights)
    again.load_state_dict(optimizer.state_dict())
    weights[1].grad = torch.ones(2)
    again.step()
    assert [again.state[weight]["step"].item() for weight in weights] == [2, 1]


@pytest.mark.parametrize("amsgrad", [False, True])
def test_torch_can_load_8_bit_checkpoints(amsgrad):
    model = network()
    train(model, optimizer := AdamW(model.parameters(), lr=1e-2, state_dtype=I8, amsgrad=amsgrad), 5)
    saved = saved_and_loaded(optimizer)
    for state in saved["state"].values():
        assert state.keys() == {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"} - {
            "" if amsgrad else "max_exp_avg_sq"
        }
        assert {value.dtype for value in state.values()} == {torch.float32}
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
    model = network()
    train(model, optimizer := AdamW(model.parameters()), 1)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["note"] = torch.ones(2)
    optimizer.load_state_dict(saved)
    assert optimizer.state[model[0].weight]["note"].tolist() == [1.0, 1.0]


def test_a_master_halfway_between_two_weights_loads_without_loss():
    """An fp32 master rounds to the even weight. A split master rounds away from zero, so the weight changes."""
    param = torch.nn.Parameter(torch.full((4,), 1.0, dtype=B16))
    param.grad = torch.zeros_like(param)
    (source := AdamW([param], master="fp32")).step()
    saved = copy.deepcopy(source.state_dict())
    saved["state"][0]["master"].fill_(1.0 + 2**-8)
    optimizer = AdamW([param])
    optimizer.load_state_dict(saved)
    optimizer.param_groups[0].update(lr=0.0, weight_decay=0.0)
    optimizer.step()
    assert param.tolist() == [1.0 + 2**-7] * 4
    assert join(param.detach(), optimizer.state[param]["remainder"]).tolist() == [1.0 + 2**-8] * 4


def test_a_parameter_without_a_state_is_not_saved():
    weights = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = AdamW(weights)
    assert optimizer.state_dict()["state"] == {}
    weights[1].grad = torch.ones(3)
    optimizer.step()
    assert set(optimizer.state_dict()["state"]) == {1}


def test_max_exp_avg_sq_loads_unchanged_while_amsgrad_is_off():
    weight, optimizer = stepped(state_dtype=I8, amsgrad=True)
    optimizer.param_groups[0]["amsgrad"] = False
    before = copy.deepcopy(optimizer.state[weight])
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    torch.testing.assert_close(optimizer.state[weight], before, rtol=0, atol=0)
