"""A config can name dtypes. Numbers that a config has left as text are refused by name and value."""

import pytest
import torch

from mpkernels import doctor
from mpkernels.amp import Policy, accumulate, autocast, to_mixed
from mpkernels.nn import MLP, GatedLinear, LinearAct
from mpkernels.optim import SGD, Adam, AdamW, Lion, Muon

NAMES = {
    torch.float32: ("float32", "fp32", "torch.float32"),
    torch.bfloat16: ("bfloat16", "bf16", "torch.bfloat16"),
    torch.int8: ("int8", "torch.int8"),
}
NAMED = pytest.mark.parametrize(("name", "dtype"), [(name, dtype) for dtype, names in NAMES.items() for name in names])


def stepped(make, **change):
    param = torch.nn.Parameter(torch.linspace(-1, 1, 300))
    optimizer = make([param])
    optimizer.param_groups[0].update(change)
    for _ in range(3):
        param.grad = torch.linspace(-2, 1, 300)
        optimizer.step()
    return param.detach(), optimizer.state_dict()["param_groups"][0]["state_dtype"], optimizer.state[param]


@NAMED
@pytest.mark.parametrize("kind", [AdamW, Adam, SGD, Lion])
def test_a_state_dtype_may_be_a_name(kind, name, dtype):
    options = {"momentum": 0.9} if kind is SGD else {}
    weight, saved, state = stepped(lambda params: kind(params, state_dtype=dtype, **options))
    assert dtype in {it.dtype for it in state.values()}
    makes = {
        "optimizer": lambda params: kind(params, state_dtype=name, **options),
        "group": lambda params: kind([{"params": params, "state_dtype": name}], **options),
        "as saved": lambda params: kind(params, state_dtype=saved, **options),
    }
    for make in makes.values():
        assert torch.equal(stepped(make)[0], weight)
    assert torch.equal(stepped(lambda params: kind(params, **options), state_dtype=name)[0], weight)


@pytest.mark.parametrize("name", ["bfloat", "torch.nn", "Tensor", ""])
def test_other_names_are_refused(name):
    with pytest.raises(ValueError, match=f"AdamW: state_dtype must be torch.float32, .*, got '{name}'"):
        AdamW([torch.ones(1)], state_dtype=name)


def test_to_mixed_accumulate_advise_and_policies_take_names():
    assert to_mixed(torch.nn.Linear(2, 2), "bf16").weight.dtype == torch.bfloat16
    assert to_mixed(torch.nn.Linear(2, 2), "torch.float16").weight.dtype == torch.float16
    with pytest.raises(ValueError, match=r"to_mixed: dtype must be torch.bfloat16 or .* got torch.float64"):
        to_mixed(torch.nn.Linear(2, 2), "float64")
    model = to_mixed(torch.nn.Linear(2, 2), "bfloat16")
    optimizer = AdamW(model.parameters())
    for micro in accumulate([torch.ones(1, 2)] * 2, 2, optimizer, grad_dtype="fp32"):
        micro.backward(model(micro.batch).sum())
    assert model.weight.grad is None
    assert [bool(doctor.advise(torch.nn.Linear(8, 12), it)) for it in ("bf16", "float32")] == [True, False]
    for name in ("mixed_bfloat16", "bf16", "bfloat16", "torch.bfloat16"):
        assert Policy(name) == Policy("mixed_bfloat16")
    assert Policy("fp32") == Policy("float32") == Policy("torch.float32")


def test_autocast_and_layers_take_names():
    for cast in (autocast("cpu", "bf16"), autocast(device_type="cpu", dtype="bfloat16"), autocast(True, "bf16")):
        assert (cast.fast_dtype, cast._enabled) == (torch.bfloat16, True)
    for layer in (LinearAct(2, 2, dtype="bf16"), GatedLinear(2, 2, dtype="torch.bfloat16"), MLP(2, 2, dtype="bf16")):
        assert {param.dtype for param in layer.parameters()} == {torch.bfloat16}
    with pytest.raises(TypeError, match="dtype"):
        LinearAct(2, 2, dtype="b16")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"lr": "3e-4"}, "lr must be a number, got '3e-4'"),
        ({"eps": "1e-8"}, "eps must be a number, got '1e-8'"),
        ({"weight_decay": "0.1"}, "weight_decay must be a number, got '0.1'"),
        ({"betas": (0.9, "0.95")}, r"betas\[1\] must be a number, got '0.95'"),
        ({"betas": "0.9,0.95"}, "betas must be two numbers, got '0.9,0.95'"),
        ({"max_norm": "1.0"}, "max_norm must be a number above 0 or None, got '1.0'"),
        ({"max_norm": 0}, "max_norm must be above 0, got 0; None turns clipping off"),
    ],
)
def test_text_and_zero_for_numbers_are_refused_by_name_and_value(options, text):
    with pytest.raises((TypeError, ValueError), match=f"AdamW: {text}"):
        AdamW([torch.ones(1)], **options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"momentum": "0.95"}, "momentum must be a number, got '0.95'"),
        ({"ns_steps": "5"}, "ns_steps must be a number, got '5'"),
        ({"ns_coefficients": (3.4, "-4.7", 2.0)}, r"ns_coefficients\[1\] must be a number, got '-4.7'"),
    ],
)
def test_muon_refuses_text_for_numbers(options, text):
    with pytest.raises(TypeError, match=f"Muon: {text}"):
        Muon([torch.ones(1, 1)], **options)
