"""Whatever happens to the layers before or after fuse: the fused model computes what the plain model computes with the
same change, to the bit, because the lines run as they were written."""

import copy
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.ao.quantization import quantize_dynamic
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations, parametrize, prune
from torch.testing import assert_close

from mpkernels.nn import fuse, unfuse
from tests.networks import one_thread
from tests.nn.fusing.models import Chain, Gated, GatedApart, Mlp, Packed, X, recorded_ops

__all__ = ["one_thread"]  # a fixture that each test uses

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # of weight_norm
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:torch.quantize_per_tensor"),  # of torch.ao
]


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


class Wrapped(nn.Module):
    """As an adapter does: the layer, and something beside it."""

    def __init__(self, layer):
        super().__init__()
        self.base_layer, self.beside = layer, nn.Linear(layer.in_features, layer.out_features)

    def forward(self, x):
        return self.base_layer(x) + self.beside(x)


class OwnTensor(torch.Tensor):
    """As quantised weights are."""


def wrap(model, name):
    torch.manual_seed(1)
    setattr(model, name, Wrapped(getattr(model, name)))


def replace_weight_by_subclass(model, name):
    layer = getattr(model, name)
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(OwnTensor))


def replace_forward(model, name):
    layer = getattr(model, name)
    layer.forward = lambda x: nn.Linear.forward(layer, x) + 1


def of_layer(change):
    return lambda model, name: change(getattr(model, name))


def call_another(model, name):
    getattr(model, name).forward = nn.Linear(8, getattr(model, name).out_features).forward


@pytest.mark.parametrize("form", [Gated, GatedApart, Packed])
@pytest.mark.parametrize("name", ["fc1", "up", "packed"])
def test_a_gate_that_is_as_wide_no_more_is_broadcast(form, name):
    model = form()
    fuse(model)
    setattr(model, name, nn.Linear(8, 3 if name == "packed" else 1))
    plain = copy.deepcopy(model)
    unfuse(plain)
    plain.fc2 = model.fc2 = nn.Linear(2, 8) if form is Packed and name == "packed" else model.fc2
    assert_close(model(X), plain(X), rtol=1e-5, atol=1e-6)


CHANGES = {
    "wrapped": wrap,
    "forward hook": of_layer(lambda it: it.register_forward_hook(lambda module, arguments, y: y * 2)),
    "forward pre-hook": of_layer(lambda it: it.register_forward_pre_hook(lambda module, arguments: arguments[0] * 2)),
    "backward hook": of_layer(lambda it: it.register_full_backward_hook(lambda module, dx, dy: (dx[0] * 2,))),
    "backward pre-hook": of_layer(lambda it: it.register_full_backward_pre_hook(lambda module, dy: (dy[0] * 2,))),
    "forward of the instance": replace_forward,
    "forward of another layer": call_another,
    "prune": of_layer(lambda it: prune.l1_unstructured(it, "weight", 0.5)),
    "weight_norm": of_layer(lambda it: nn.utils.weight_norm(it).weight_g.data.mul_(2)),
    "parametrized weight_norm": of_layer(lambda it: parametrizations.weight_norm(it)),
    "parametrize": of_layer(lambda it: parametrize.register_parametrization(it, "weight", Doubled())),
    "weight of a subclass": replace_weight_by_subclass,
    "checkpoint_wrapper": lambda model, name: setattr(model, name, checkpoint_wrapper(getattr(model, name))),
    "another class": lambda model, name: setattr(model, name, nn.Sequential(nn.Linear(8, 16))),
}
LAYERS = {Mlp: "fc1", Chain: "fc1", GatedApart: "up", Packed: "packed"}


def results(model):
    model.zero_grad()
    x = X.clone().requires_grad_()
    y = model(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(it.grad for it in model.parameters() if it.grad is not None)]


@pytest.mark.parametrize("kind", LAYERS, ids=lambda it: it.__name__)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("is_first", [True, False], ids=["fused first", "fused last"])
def test_a_changed_layer_computes_as_in_the_plain_model(kind, change, is_first):
    if change == "another class" and kind is Packed:
        pytest.skip("half as many features")
    plain, fused = kind(), kind()
    torch.manual_seed(2)
    CHANGES[change](plain, LAYERS[kind])
    fuse(fused if is_first else nn.Identity())
    torch.manual_seed(2)
    CHANGES[change](fused, LAYERS[kind])
    fuse(fused)
    with recorded_ops() as ran:
        got = results(fused)
    assert not {"mlp", "gated_mlp"} & set(ran)
    if is_first:
        assert ran == []
        assert_close(got, results(plain), rtol=0, atol=0)
    assert_close(got, results(plain), rtol=1e-5, atol=1e-5)
    unfuse(fused)
    assert_close(results(fused), results(plain), rtol=0, atol=0)


@contextmanager
def global_hook(register, hook):
    handle = register(hook)
    yield
    handle.remove()


GLOBAL_HOOKS = {
    "forward": (nn.modules.module.register_module_forward_hook, lambda module, arguments, y: y * 1.5),
    "forward pre": (nn.modules.module.register_module_forward_pre_hook, lambda module, arguments: arguments[0] * 1.5),
    "backward": (nn.modules.module.register_module_full_backward_hook, lambda module, dx, dy: (dx[0] * 1.5,)),
}


@pytest.mark.parametrize("hook", GLOBAL_HOOKS)
def test_global_hooks_see_each_module(hook):
    plain, fused = Chain(), Chain()
    fuse(fused)
    with global_hook(*GLOBAL_HOOKS[hook]), recorded_ops() as ran:
        assert_close(results(fused), results(plain), rtol=0, atol=0)
        assert ran == []
    with recorded_ops() as ran:
        assert_close(results(fused), results(plain), rtol=1e-5, atol=1e-5)
    assert ran == ["mlp"]


def test_another_activation_and_another_dropout_are_computed():
    plain, fused = Chain(), Chain()
    fuse(fused)
    for replace, ops in ((nn.SiLU, ["mlp"]), (nn.ELU, []), (lambda: torch.relu, ["mlp"])):
        for model in (plain, fused):
            del model.act
            model.act = replace()
        with recorded_ops() as ran:
            assert_close(results(fused), results(plain), rtol=1e-5, atol=1e-5)
        assert ran == ops
    for model in (plain, fused):
        model.dropout = nn.Dropout(1.0)
    assert_close(fused(X), plain(X), rtol=0, atol=0)
    for model in (plain, fused):
        model.dropout = nn.AlphaDropout(0.0)
    with recorded_ops() as ran:
        assert_close(fused(X), plain(X), rtol=0, atol=0)
    assert ran == []


def sequential():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.0), nn.Linear(16, 8))


def dropout_of(model):
    return model.dropout if isinstance(model, Chain) else model[2]


DROPOUT_CHANGES = {
    "forward hook": lambda it: it.register_forward_hook(lambda module, arguments, y: y * 2),
    "forward pre-hook": lambda it: it.register_forward_pre_hook(lambda module, arguments: arguments[0] * 2),
    "backward hook": lambda it: it.register_full_backward_hook(lambda module, dx, dy: (dx[0] * 2,)),
    "forward of the instance": lambda it: setattr(it, "forward", lambda x: x + 1),
}


@pytest.mark.parametrize("make", [Chain, sequential], ids=lambda it: it.__name__)
@pytest.mark.parametrize("change", DROPOUT_CHANGES)
@pytest.mark.parametrize("is_first", [True, False], ids=["fused first", "fused last"])
def test_a_changed_dropout_computes_as_in_the_plain_model(make, change, is_first):
    plain, fused = make(), make()
    fuse(fused if is_first else nn.Identity())
    for model in (plain, fused):
        DROPOUT_CHANGES[change](dropout_of(model))
    fuse(fused)
    with recorded_ops() as ran:
        got = results(fused)
    assert "mlp" not in ran
    assert_close(got, results(plain), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("make", [Chain, sequential], ids=lambda it: it.__name__)
def test_a_dropout_has_a_mode_of_its_own(make):
    """Whatever the mode of the layers beside it."""
    model = make()
    dropout_of(model).p = 0.5
    want = model.eval()(X)
    fuse(model)
    model.train()
    dropout_of(model).eval()
    with recorded_ops() as ran:
        assert_close(model(X), want, rtol=1e-5, atol=1e-6)
    assert ran == ["mlp"]
    model.eval()
    dropout_of(model).train()
    with recorded_ops() as ran:
        assert not torch.allclose(model(X), want, rtol=1e-2, atol=1e-2)
    assert ran == ["mlp"]


def test_dropout_follows_the_modules_mode():
    fused = Chain()
    fused.dropout.p = 0.5
    want = fused.eval()(X)
    fuse(fused)
    assert_close(fused(X), want, rtol=1e-5, atol=1e-6)
    assert (fused.train()(X) == 0).any()


def test_a_hook_that_is_removed_leaves_the_fused_op():
    model = Mlp()
    fuse(model)
    handle = model.fc1.register_forward_hook(lambda module, arguments, y: y)
    for ops in ([], ["mlp"]):
        with recorded_ops() as ran:
            model(X)
        assert ran == ops
        handle.remove()


def test_an_input_of_a_subclass_sees_each_module():
    model = Mlp()
    fuse(model)
    with recorded_ops() as ran:
        assert type(model(X.as_subclass(OwnTensor))) is OwnTensor
    assert ran == []


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of torch.compile
def test_a_layer_that_is_compiled_by_itself_is_called():
    plain, fused = Mlp(), Mlp()
    fuse(fused)
    fused.fc1.compile(backend="eager")
    with recorded_ops() as ran:
        assert_close(fused(X), plain(X), rtol=0, atol=0)
    assert ran == []
    torch.compiler.reset()


def test_quantize_dynamic():
    plain = Mlp()
    fused = copy.deepcopy(plain)
    fuse(fused)
    plain, fused = (quantize_dynamic(it.eval(), {nn.Linear}) for it in (plain, fused))
    with torch.no_grad():
        assert_close(fused(X), plain(X), rtol=0, atol=0)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of torch.compile
def test_a_compiled_model_sees_what_the_compiled_plain_model_sees(change):
    """torch.compile passes some hooks over which come after it."""
    models = Mlp(), Mlp()
    fuse(models[1])
    compiled = [torch.compile(it, backend="eager", fullgraph="hook" not in change) for it in models]
    assert_close(compiled[1](X), compiled[0](X), rtol=1e-5, atol=1e-6)
    for model in models:
        torch.manual_seed(2)
        CHANGES[change](model, "fc1")
    assert_close(compiled[1](X), compiled[0](X), rtol=1e-5, atol=1e-6)
    torch.compiler.reset()
