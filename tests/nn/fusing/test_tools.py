"""A fused model can be copied and saved, and works with torch's tools."""

import copy
import gc
import inspect
import io
import pickle
import traceback
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.testing import assert_close

from mpkernels.amp import to_full, to_mixed
from mpkernels.nn import fuse, unfuse
from mpkernels.optim import AdamW
from tests.nn.fusing.feed_forwards import KINDS, made
from tests.nn.fusing.models import Chain, Doubled, Gated, InMethod, Keywords, Mlp, TwoInARow, X, recorded_ops


def through_a_file(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "torch.save": through_a_file,
    **{f"pickle {it}": lambda model, it=it: pickle.loads(pickle.dumps(model, it)) for it in (2, 5)},
}


@pytest.mark.parametrize("clone", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("name", ["two modules", *KINDS])
def test_a_copy_is_fused_like_its_model(name, clone):
    model = nn.Sequential(Chain(), TwoInARow()) if name == "two modules" else made(name)
    classes = [type(it) for it in model.modules()]
    fuse(model)
    copied = clone(model)
    assert [type(it) for it in copied.modules()] == [type(it) for it in model.modules()] != classes
    assert_close(copied(X), model(X), rtol=0, atol=0)
    unfuse(copied)
    assert [type(it) for it in copied.modules()] == classes


def test_a_copy_is_plain_where_the_source_has_changed_since():
    model = Chain()
    fuse(model)
    restore, (kind, plan), *_ = model.__reduce_ex__(2)
    [(name, [(index, text)])] = plan
    assert type(restore(kind, plan)) is type(model)
    for method, site in ((name, (index, "fc1(act(x))")), (name, (99, "")), ("a_method_that_is_gone", (index, text))):
        assert type(restore(kind, ((method, (site,)),))) is Chain


class WithState(Mlp):
    def __getstate__(self):
        return self.__dict__ | {"was_pickled": True}


class WithReduce(Mlp):
    def __reduce__(self):
        return WithReduce, ()


def test_a_module_is_pickled_by_its_own_methods():
    model = WithState()
    fuse(model)
    copied = copy.deepcopy(model)
    assert copied.was_pickled
    assert type(copied) is type(model)
    model = WithReduce()
    fuse(model)
    assert type(pickle.loads(pickle.dumps(model))) is WithReduce


def test_modules_of_a_class_share_a_fused_class_which_is_freed_with_them():
    class KnownNowhereElse(Mlp):  # not Mlp: fully_shard keeps the classes of other tests alive
        def forward(self, x):
            return self.act(self.fc1(x))

    one, other = KnownNowhereElse(), KnownNowhereElse()
    fuse(one)
    fuse(other)
    assert type(one) is type(other) is not KnownNowhereElse
    kind = weakref.ref(type(one))
    del one, other
    gc.collect()
    assert kind() is None


def test_the_fused_class_looks_like_the_plain_one():
    model = Keywords()
    fuse(model)
    kind = type(model)
    assert (kind.__name__, kind.__qualname__, kind.__module__) == ("Keywords", "Keywords", Keywords.__module__)
    assert inspect.signature(kind.forward) == inspect.signature(Keywords.forward)
    assert kind.forward.__doc__ == "Scale."
    assert kind.forward.__globals__ is Keywords.forward.__globals__
    assert inspect.getsource(kind.forward) == inspect.getsource(Keywords.forward)
    assert repr(model) == repr(Keywords())
    assert_close(model(X, scale=3.0), Keywords()(X, scale=3.0))


def test_a_traceback_shows_the_line_as_it_was_written():
    lines = []
    for is_fused in (False, True):
        model = Chain()
        if is_fused:
            fuse(model)
        model.fc2 = None
        with pytest.raises(TypeError) as error:
            model(X)
        frame = next(it for it in traceback.extract_tb(error.value.__traceback__) if it.name == "forward")
        lines.append((frame.filename, frame.lineno, frame.line))
    assert lines[0] == lines[1]


def test_parameters_hooks_and_ties_stay():
    model = Mlp()
    model.fc2.weight = nn.Parameter(model.fc1.weight.detach().T.clone())
    model.other = nn.Linear(8, 16)
    model.other.weight = model.fc1.weight
    model.fc1.bias.requires_grad_(False)
    seen = []
    model.register_forward_hook(lambda module, arguments, y: seen.append(y.shape))
    before, keys = dict(model.named_parameters()), list(model.state_dict())
    fuse(model)
    model(X).sum().backward()
    assert seen == [X.shape]
    assert list(model.state_dict()) == keys
    assert all(it is before[name] for name, it in model.named_parameters())
    assert model.other.weight is model.fc1.weight
    assert model.fc1.bias.grad is None
    assert model.fc1.weight.grad is not None


RECORDERS = {
    "jit.trace": lambda model, x: torch.jit.trace(model, x, check_trace=False),
    "jit.script": lambda model, x: torch.jit.script(model),
    "fx": lambda model, x: torch.fx.symbolic_trace(model),
    "export": lambda model, x: torch.export.export(model, (x,)).module(),
    "strict export": lambda model, x: torch.export.export(model, (x,), strict=True).module(),
    "compile": lambda model, x: torch.compile(model, backend="aot_eager", fullgraph=True),
}


def sequential():
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


RECORDED = {"Mlp": Mlp, "Gated": Gated, "sequential": sequential} | {name: partial(made, name) for name in KINDS}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", RECORDED)
@pytest.mark.parametrize("recorder", RECORDERS)
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of torch.compile
def test_a_recorded_model_runs_as_it_was_written(recorder, name):
    if recorder in ("jit.script", "fx") and name.startswith("diffusers"):
        pytest.skip("takes no forward with further arguments, of plain models either")
    model = RECORDED[name]().eval()
    want = model(X)
    fuse(model)
    with recorded_ops() as ran:
        recorded = RECORDERS[recorder](model, X)
    assert ran == []
    assert_close(recorded(X), want, rtol=1e-5, atol=1e-5)
    torch.compiler.reset()


@pytest.mark.parametrize("recorder", ["jit.trace", "jit.script", "fx"])
def test_a_recorded_part_is_left_and_the_rest_is_fused(recorder):
    model = nn.Sequential(RECORDERS[recorder](sequential(), X), nn.Linear(8, 8), nn.GELU())
    kinds, want = [type(it) for it in model.modules()], model(X)
    for dry_run in (True, False, False):
        report = fuse(model, dry_run)
        assert [it[:2] for it in report.fused] == [("", "Linear, GELU")]
        assert report.left == [("0", "Sequential", "its forward was generated")]
        assert report.saved_bytes(X).plain > 0
        assert "its forward was generated" in str(report)
        assert_close(model(X), want)
    unfuse(model)
    assert [type(it) for it in model.modules()] == kinds


def test_a_scripted_linear_is_no_plain_one():
    model = nn.Sequential(torch.jit.script(nn.Linear(8, 8)), nn.GELU())
    [site] = fuse(model).left
    assert site.reason == "RecursiveScriptModule is no plain torch.nn.Linear"


def test_a_parametrized_model_can_be_fused_and_unfused():
    model, plain = Mlp(), Mlp()
    for it in (model, plain):
        it.scale = nn.Parameter(torch.ones(()))
    fuse(model)
    kind = type(model)
    parametrize.register_parametrization(model, "scale", Doubled())
    assert_close(model(X), plain(X))
    assert fuse(model).fused
    parametrize.remove_parametrizations(model, "scale")
    assert type(model) is kind
    parametrize.register_parametrization(model, "scale", Doubled())
    unfuse(model)
    parametrize.remove_parametrizations(model, "scale")
    assert type(model) is Mlp
    parametrize.register_parametrization(plain, "scale", Doubled())
    [site] = fuse(plain).left
    assert site.reason == "its forward reads parametrized tensors of its own"


@pytest.mark.parametrize(("make", "op"), [(InMethod, "mlp"), (partial(made, "diffusers' GEGLU"), "gated_mlp")])
def test_functional_call_and_vmap_give_the_same_results(make, op):
    model = make()
    want = model(X)
    fuse(model)
    state = dict(model.named_parameters())
    assert_close(torch.func.functional_call(model, state, (X,)), want, rtol=1e-5, atol=1e-5)
    got = torch.func.vmap(lambda x: torch.func.functional_call(model, state, (x,)))(X)
    assert_close(got, want, rtol=1e-5, atol=1e-5)
    doubled = {name: 2 * it.detach() for name, it in state.items()}
    with recorded_ops() as ran:
        assert not torch.equal(torch.func.functional_call(model, doubled, (X,)), want)
    assert ran == [op]


def test_a_fused_model_can_become_mixed_and_come_back():
    model = Mlp()
    fuse(model)
    kind, optimizer = type(model), AdamW(model.parameters())
    to_mixed(model, optimizer=optimizer)
    for copied in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with recorded_ops() as ran:
            assert copied(X).dtype == torch.bfloat16
        assert ran == ["mlp"]
    with pytest.raises(ValueError, match=r"^unfuse: model must not wrap the forward .* around the model: undo that"):
        unfuse(model)
    to_full(model, optimizer)
    assert type(model) is kind
    unfuse(model)
    assert type(model) is Mlp


@pytest.mark.parametrize("unfuses_first", [True, False])
def test_a_mixed_model_can_be_fused_and_come_back(unfuses_first):
    model = Mlp()
    optimizer = AdamW(model.parameters())
    to_mixed(model, optimizer=optimizer)
    kind, want = type(model), model(X)
    assert fuse(model).left == []
    copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for it, ops in ((model, ["mlp"]), *((copied, []) for copied in copies)):
        with recorded_ops() as ran:
            error = it(X).float() - want.float()
        assert error.norm() <= 6 * 2**-9 * want.float().norm()  # each way rounds z, h and y, by 2^-9 at most
        assert ran == ops
    if unfuses_first:
        unfuse(model)
        assert type(model) is kind
    to_full(model, optimizer)
    assert type(model) is Mlp


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of torch.compile
def test_a_compiled_model_can_be_fused_and_unfused():
    model = Mlp()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    want = compiled(X)
    fuse(compiled)
    assert type(model) is not Mlp
    assert_close(compiled(X), want, rtol=1e-5, atol=1e-6)
    unfuse(compiled)
    assert_close(compiled(X), want, rtol=0, atol=0)
    torch.compiler.reset()
