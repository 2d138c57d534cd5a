"""Whatever happens to a part of a model before or after fuse: the fused model computes what the plain model computes
with the same change, to the bit, because the lines run as they were written."""

import copy
from contextlib import contextmanager
from functools import partial

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.ao.quantization import quantize_dynamic
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations, parametrize, prune
from torch.testing import assert_close

from mpkernels.nn import fuse, unfuse
from tests.nn.fusing import as_diffusers
from tests.nn.fusing.feed_forwards import KINDS, FeedForward, TimmMlp, made, results
from tests.nn.fusing.models import Chain, Doubled, Gated, GatedApart, Mlp, Packed, X, assert_computes, recorded_ops

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # of weight_norm
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:torch.quantize_per_tensor"),  # of torch.ao
]
FORMS = {"Mlp": Mlp, "gate and up apart": GatedApart, "gate and up in one": Packed}
OUTSIDE = ("", "net", "layers", "layers.0", "drop2", "6", "net.3")  # modules that the op doesn't replace
PARTS = {
    "Mlp": ["fc1", "act", "fc2"],
    "gate and up apart": ["fc1", "up", "act", "dropout", "fc2"],
    "gate and up in one": ["packed", "fc2"],
    **{name: [part for part, _ in made(name).named_modules() if part not in OUTSIDE] for name in KINDS},
}


class Adapted(nn.Module):
    """A wrapper like an adapter: it calls the layer and adds something."""

    def __init__(self, layer):
        super().__init__()
        self.base_layer, self.beside = layer, nn.Linear(layer.in_features, layer.out_features)

    def forward(self, x):
        return self.base_layer(x) + self.beside(x)


class UsersTensor(torch.Tensor):
    """A tensor subclass, as quantised weights are."""


class UsersLinear(nn.Linear):
    def forward(self, x):
        return F.relu(F.linear(x, self.weight))


class UsersDropout(nn.Dropout):
    def forward(self, x):
        return super().forward(x) + 1


def by_replacing(change):
    """Return a function that replaces a part of a model by ``change(part)``."""

    def replace(model, part):
        owner, _, name = part.rpartition(".")
        setattr(model.get_submodule(owner), name, change(model.get_submodule(part)))

    return replace


def by_calling(change):
    """Return a function that calls ``change(part)``."""
    return lambda model, part: change(model.get_submodule(part))


def double_forward(module):
    forward = module.forward
    module.forward = lambda *arguments: 2 * forward(*arguments)


def call_another(layer):
    layer.forward = nn.Linear(layer.in_features, layer.out_features).forward


def take_weight_of_a_subclass(layer):
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(UsersTensor))


CHANGES_OF_ANY_PART = {
    "forward hook": by_calling(lambda it: it.register_forward_hook(lambda module, arguments, y: y * 2)),
    "forward pre-hook": by_calling(lambda it: it.register_forward_pre_hook(lambda module, arguments: arguments[0] * 2)),
    "backward hook": by_calling(lambda it: it.register_full_backward_hook(lambda module, dx, dy: (dx[0] * 2,))),
    "backward pre-hook": by_calling(lambda it: it.register_full_backward_pre_hook(lambda module, dy: (dy[0] * 2,))),
    "forward of the instance": by_calling(double_forward),
    "another activation": by_replacing(lambda it: nn.Sequential(it, nn.ELU())),
}
CHANGES_OF_LAYERS = {
    "adapter": by_replacing(Adapted),
    "forward of another layer": by_calling(call_another),
    "prune": by_calling(lambda it: prune.l1_unstructured(it, "weight", 0.5)),
    "hooked weight_norm": by_calling(lambda it: nn.utils.weight_norm(it).weight_g.data.mul_(2)),
    "weight_norm": by_calling(parametrizations.weight_norm),
    "orthogonal": by_calling(parametrizations.orthogonal),
    "parametrize": by_calling(lambda it: parametrize.register_parametrization(it, "weight", Doubled())),
    "weight of a subclass": by_calling(take_weight_of_a_subclass),
    "checkpoint_wrapper": by_replacing(checkpoint_wrapper),
    "another class": by_replacing(lambda it: UsersLinear(it.in_features, it.out_features)),
}
CHANGES = CHANGES_OF_ANY_PART | CHANGES_OF_LAYERS


def made_in_any_form(name):
    return FORMS[name]() if name in FORMS else made(name)


def assert_computes_as_plain(name, part, change, fused_first):
    plain, fused = made_in_any_form(name), made_in_any_form(name)
    if fused_first:
        fuse(fused)
    for model in (plain, fused):
        torch.manual_seed(2)
        CHANGES[change](model, part)
    if not fused_first:
        fuse(fused)
    with recorded_ops() as ran:
        got = results(fused)
    assert set(ran) <= (set() if fused_first else {"linear_act", "gated_linear"})
    want = results(plain)
    assert_close(got, want, rtol=1e-5 if ran else 0, atol=1e-5 if ran else 0)
    unfuse(fused)
    assert_close(results(fused), want, rtol=0, atol=0)


in_either_order = pytest.mark.parametrize("fused_first", [True, False], ids=["fused first", "fused last"])


@in_either_order
@pytest.mark.parametrize("change", CHANGES_OF_ANY_PART)
@pytest.mark.parametrize("name", PARTS)
def test_a_changed_part_computes_as_in_the_plain_model(name, change, fused_first):
    for part in PARTS[name]:
        assert_computes_as_plain(name, part, change, fused_first)


@in_either_order
@pytest.mark.parametrize("change", CHANGES_OF_LAYERS)
@pytest.mark.parametrize("name", PARTS)
def test_a_changed_layer_computes_as_in_the_plain_model(name, change, fused_first):
    model = made_in_any_form(name)
    for part in PARTS[name]:
        if isinstance(model.get_submodule(part), nn.Linear):
            assert_computes_as_plain(name, part, change, fused_first)


@pytest.mark.parametrize("form", [Gated, GatedApart, Packed])
@pytest.mark.parametrize("name", ["fc1", "up", "packed"])
def test_a_gate_that_becomes_narrower_is_broadcast(form, name):
    model = form()
    fuse(model)
    setattr(model, name, nn.Linear(8, 3 if name == "packed" else 1))
    plain = copy.deepcopy(model)
    unfuse(plain)
    plain.fc2 = model.fc2 = nn.Linear(2, 8) if form is Packed and name == "packed" else model.fc2
    assert_close(model(X), plain(X), rtol=1e-5, atol=1e-6)


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
def test_a_global_hook_runs_for_each_module(hook):
    plain, fused = Chain(), Chain()
    fuse(fused)
    with global_hook(*GLOBAL_HOOKS[hook]), recorded_ops() as ran:
        assert_close(results(fused), results(plain), rtol=0, atol=0)
        assert ran == []
    assert_computes(partial(results, fused), results(plain), ["mlp"])


def test_a_replaced_activation_and_dropout_are_computed():
    plain, fused = Chain(), Chain()
    fuse(fused)
    for replace, ops in ((nn.SiLU, ["mlp"]), (nn.ELU, []), (lambda: torch.relu, ["mlp"])):
        for model in (plain, fused):
            del model.act
            model.act = replace()
        assert_computes(partial(results, fused), results(plain), ops)
    for model in (plain, fused):
        model.dropout = nn.Dropout(1.0)
    assert_close(fused(X), plain(X), rtol=0, atol=0)


def test_an_input_of_a_subclass_runs_the_plain_lines():
    model = Mlp()
    fuse(model)
    with recorded_ops() as ran:
        assert type(model(X.as_subclass(UsersTensor))) is UsersTensor
    assert ran == []


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of torch.compile
def test_a_layer_that_is_compiled_by_itself_is_called():
    plain, fused = Mlp(), Mlp()
    fuse(fused)
    fused.fc1.compile(backend="eager")
    assert_computes(fused, plain(X), [])
    torch.compiler.reset()


def test_quantize_dynamic_gives_the_plain_models_result():
    plain = Mlp()
    fused = copy.deepcopy(plain)
    fuse(fused)
    plain, fused = (quantize_dynamic(it.eval(), {nn.Linear}) for it in (plain, fused))
    with torch.no_grad():
        assert_close(fused(X), plain(X), rtol=0, atol=0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of torch.compile
def test_a_compiled_model_computes_as_the_compiled_plain_model(change):
    """torch.compile ignores some hooks that are added after it."""
    models = Mlp(), Mlp()
    fuse(models[1])
    compiled = [torch.compile(it, backend="eager", fullgraph="hook" not in change) for it in models]
    assert_close(compiled[1](X), compiled[0](X), rtol=1e-5, atol=1e-6)
    for model in models:
        torch.manual_seed(2)
        CHANGES[change](model, "fc1")
    assert_close(compiled[1](X), compiled[0](X), rtol=1e-5, atol=1e-6)
    torch.compiler.reset()


def test_a_method_that_an_instance_gets_is_called():
    model = FeedForward(as_diffusers.GELU)
    fuse(model)
    model.net[0].gelu = torch.relu
    want = model.net[2](torch.relu(model.net[0].proj(X)))
    assert_computes(model, want, [])


def test_an_identity_may_become_a_norm_and_come_back():
    model = TimmMlp()
    fuse(model)
    model.norm = nn.LayerNorm(16)
    want = model.fc2(model.norm(model.act(model.fc1(X))))
    assert_computes(model, want, [])
    model.norm = nn.Identity()
    with recorded_ops() as ran:
        model(X)
    assert ran == ["mlp"]
    assert [site.stood_there for site in fuse(TimmMlp(norm=nn.LayerNorm)).fused] == ["act(fc1(x))"]


@pytest.mark.parametrize("dropout", [nn.AlphaDropout, nn.Dropout1d, UsersDropout])
def test_a_dropout_of_another_class_is_called(dropout):
    model = TimmMlp()
    fuse(model)
    model.drop1 = dropout(0.0)
    want = model.fc2(model.drop1(model.act(model.fc1(X))))
    assert_computes(model, want, [])
