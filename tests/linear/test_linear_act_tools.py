"""What torch's own tools do to a LinearAct, and how it is made of a Linear and becomes one."""

import pytest
import torch
from torch.nn import functional
from torch.nn.utils import parametrizations, prune
from torch.testing import assert_close

from mpkernels.functional import linear_act
from mpkernels.nn import LinearAct

MODULES = {
    "none": torch.nn.Identity(),
    "relu": torch.nn.ReLU(inplace=True),
    "gelu": torch.nn.GELU(),
    "gelu_tanh": torch.nn.GELU(approximate="tanh"),
    "silu": torch.nn.SiLU(),
    "sigmoid": torch.nn.Sigmoid(),
    "tanh": torch.nn.Tanh(),
}
X = torch.randn(3, 7, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("name", "module"), MODULES.items(), ids=MODULES)
def test_an_activation_may_be_a_module(target, name, module):
    layer, x = LinearAct(7, 5, activation=module).to(target.device), X.to(target.device)
    assert layer.activation == name
    assert torch.equal(layer(x), linear_act(x, layer.weight, layer.bias, name))
    assert torch.equal(layer(x), linear_act(x, layer.weight, layer.bias, module))
    assert_close(layer(x), module(functional.linear(x, layer.weight, layer.bias)))
    assert LinearAct(7, 5, activation=type(module)).activation == name.removesuffix("_tanh")


def test_a_module_as_activation_compiles():
    weight, module = torch.randn(5, 7), torch.nn.GELU(approximate="tanh")
    compiled = torch.compile(lambda x: linear_act(x, weight, None, module), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(X), linear_act(X, weight, None, "gelu_tanh"))
    torch.compiler.reset()


class UsersGelu(torch.nn.GELU):
    def forward(self, input):
        return 2 * super().forward(input)


def hooked():
    module = torch.nn.GELU()
    module.register_forward_hook(lambda module, arguments, output: 2 * output)
    return module


@pytest.mark.parametrize(
    "make", [torch.nn.ReLU6, torch.nn.PReLU, UsersGelu, lambda: functional.gelu, lambda: "swish", hooked]
)
def test_an_unknown_activation_is_refused(make):
    known = "one of none, relu, relu2, gelu, gelu_tanh, silu, sigmoid, tanh, got "
    text = "no hooks, which nobody would call, got _forward_hooks" if make is hooked else known
    with pytest.raises(ValueError, match=f"^LinearAct: activation must have {text}$|activation must be {text}"):
        LinearAct(7, 5, activation=make())
    with pytest.raises(ValueError, match=f"^linear_act: activation must (have|be) {text}"):
        linear_act(X, torch.ones(5, 7), None, make())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_from_linear_and_to_linear_keep_parameters_and_mode(bias, device):
    linear = torch.nn.Linear(7, 5, bias, device, torch.bfloat16).eval()
    linear.weight.requires_grad_(False)
    before = torch.get_rng_state()
    layer = LinearAct.from_linear(linear, torch.nn.SiLU())
    back = layer.to_linear()
    assert torch.equal(torch.get_rng_state(), before)
    assert (layer.activation, layer.in_features, layer.out_features) == ("silu", 7, 5)
    assert (type(layer), type(back)) == (LinearAct, torch.nn.Linear)
    for made in (layer, back):
        assert made.weight is linear.weight
        assert made.bias is linear.bias
        assert not made.training
        assert not made.weight.requires_grad
    assert repr(back) == repr(linear)
    if device == "cpu":
        assert_close(layer(X.bfloat16()), functional.silu(back(X.bfloat16())), rtol=0.02, atol=0.02)


def pruned(layer):
    prune.l1_unstructured(layer, "weight", 0.5)


def with_forward(layer):
    layer.forward = lambda x: x


def with_module(layer):
    layer.adapter = torch.nn.Linear(7, 5)


CHANGES = {
    "a hook": (lambda it: it.register_forward_hook(print), "got _forward_hooks"),
    "a hook of state_dict": (lambda it: it.register_state_dict_post_hook(lambda *_: None), "got _state_dict_hooks"),
    "pruned": (pruned, "got _forward_pre_hooks, weight_orig, weight_mask, weight"),
    "parametrized": (parametrizations.weight_norm, "whose parametrizations or forward would be lost"),
    "a forward": (with_forward, "got forward"),
    "a module": (with_module, "got adapter"),
    "a buffer": (lambda it: it.register_buffer("scale", torch.ones(1)), "got scale"),
}


@pytest.mark.parametrize(("change", "text"), CHANGES.values(), ids=CHANGES)
def test_a_layer_is_not_converted_if_something_would_be_lost(change, text):
    linear, layer = torch.nn.Linear(7, 5), LinearAct(7, 5)
    for module in (linear, layer):
        change(module)
    for op, convert in (
        ("from_linear: linear", lambda: LinearAct.from_linear(linear)),
        ("to_linear: the layer", layer.to_linear),
    ):
        error = f"^LinearAct.{op} must .*{text}.*: convert before they are added$"
        with pytest.raises((TypeError, ValueError), match=error):
            convert()


def test_each_hook_is_called_once_and_may_replace_what_it_sees(target):
    """The forward hook sees y after the activation."""
    layer, x = LinearAct(7, 5, activation="relu").to(target.device), X.clone().to(target.device).requires_grad_()
    want, seen = layer(x).detach(), []
    layer.register_forward_pre_hook(lambda module, arguments: seen.append("pre") or (2 * arguments[0],))
    layer.register_forward_hook(lambda module, arguments, y: seen.append(torch.equal(y, layer.forward(2 * x))) or y + 1)
    layer.register_full_backward_hook(lambda module, dx, dy: seen.append(dy[0].shape) or (3 * dx[0],))
    y = layer(x)
    assert (y >= 1).all()
    y.sum().backward()
    assert seen == ["pre", True, y.shape]
    dz = (layer.forward(2 * x.detach()) > 0).to(x.dtype)
    assert_close(x.grad, 6 * dz @ layer.weight)
    assert_close(want, functional.relu(functional.linear(x, layer.weight, layer.bias)))
