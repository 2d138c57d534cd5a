"""What a fused module keeps of its choices goes into no copy and no record, and no call saves other tensors for it."""

import copy
import pickle
from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import mpkernels
from mpkernels import selector
from mpkernels.nn import fuse, unfuse
from tests.linear.choosing import forget_choices
from tests.nn.fusing.choosing import Silu, asked, fused, in_a_row
from tests.nn.fusing.feed_forwards import made
from tests.nn.fusing.models import FORMS, Mlp, X, recorded_ops

__all__ = ["asked"]  # a fixture that each test of this file uses
CLONES = {"deepcopy": copy.deepcopy, "copy": copy.copy, "pickle": lambda model: pickle.loads(pickle.dumps(model))}


@pytest.mark.parametrize("clone", CLONES.values(), ids=CLONES)
@pytest.mark.parametrize("make", [Mlp, Silu, in_a_row])
def test_a_copy_is_fused_and_unfuse_leaves_nothing(make, clone):
    plain, model = make(), fused(make)
    copied = clone(model)
    assert type(copied) is type(model)
    assert_close(copied(X), model(X), rtol=0, atol=0)
    for it in (copied, model):
        with mpkernels.backend("native"), recorded_ops() as ran:
            it(X)
        assert ran == ["mlp"]
        unfuse(it)
        assert type(it) is type(plain)
        assert vars(it).keys() == vars(plain).keys()


def test_the_report_says_that_torch_is_as_fast():
    model = nn.Sequential(Mlp(), Silu())
    dry = fuse(model, dry_run=True)
    assert type(model[0]) is Mlp
    report = fuse(model)
    assert [it.computed_by for it in report.fused] == ["mlp, gelu: torch is as fast", "mlp, silu"]
    assert dry.fused == fuse(model).fused == report.fused
    assert "mlp, gelu: torch is as fast" in str(report)
    assert report.saved_bytes(X) == dry.saved_bytes(X)
    sizes = fuse(nn.Sequential(Mlp())).saved_bytes(X)
    assert sizes.plain == sizes.fused
    selector.pin("native")
    assert fuse(model).fused[0].computed_by == "mlp, gelu"


def test_on_the_meta_device_nobody_knows_yet():
    with torch.device("meta"):
        model = Mlp()
    assert [it.computed_by for it in fuse(model).fused] == ["mlp, gelu"]


def saved_by(model, x):
    """Return the node of each op of a forward, and the shape of each tensor that it saves, in this order."""
    saved, nodes = [], []
    with saved_tensors_hooks(lambda it: saved.append((it.shape, it.stride())) or it, lambda it: it):
        waiting = [model(x).grad_fn]
    while waiting:
        node = waiting.pop(0)
        if node is not None:
            nodes.append(node.name())
            waiting += [it for it, _ in node.next_functions]
    return saved, nodes


@pytest.mark.parametrize("make", [*FORMS, in_a_row, partial(made, "a loop")])
@pytest.mark.parametrize("kernel", ["torch", "native", "quiet"])
def test_each_call_saves_what_the_first_one_saved(monkeypatch, make, kernel):
    """Else a checkpoint would take the first call's tensors for others in its second."""
    if kernel == "torch":
        forget_choices(monkeypatch)
    selector.pin("native" if kernel == "native" else None)
    plain, model = make(), make()
    fuse(model)
    calls = [saved_by(model, X) for _ in range(3)]
    assert calls[0] == calls[1] == calls[2]
    assert (calls[0] == saved_by(plain, X)) == (kernel != "native")


@pytest.mark.parametrize("make", [*FORMS, in_a_row])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_may_be_the_first_call(make, use_reentrant):
    plain, model = make(), make()
    fuse(model)
    for it in (plain, model):
        for _ in range(2):
            checkpoint(it, X.clone().requires_grad_(), use_reentrant=use_reentrant).square().sum().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("make", [Mlp, Silu, in_a_row])
@pytest.mark.parametrize(
    "record",
    [
        lambda model, x: torch.jit.trace(model, x, check_trace=False),
        lambda model, x: torch.export.export(model, (x,)).module(),
        lambda model, x: torch.compile(model, backend="aot_eager", fullgraph=True),
    ],
    ids=["jit.trace", "export", "compile"],
)
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of torch.compile
def test_a_called_model_is_recorded_as_it_was_written(make, record):
    x = X.repeat(2, 1, 1)
    plain, model = make().eval(), fused(make, x).eval()
    want = plain(x)
    recorded = record(model, x)
    assert_close(recorded(x), want, rtol=1e-5, atol=1e-5)
    model(X)  # a choice that is kept later is no reason to compile again
    with torch.compiler.set_stance("fail_on_recompile"):
        assert_close(recorded(x), want, rtol=1e-5, atol=1e-5)
    torch.compiler.reset()


def test_hooks_modes_and_functional_calls_find_what_was_written():
    model, x = fused(Silu), X.repeat(2, 1, 1)
    seen = []
    model.fc1.register_forward_hook(lambda *_: seen.append("hook"))
    with recorded_ops() as ran:
        model(x), model(X[0, :3])
    assert (seen, ran) == (["hook"] * 2, [])
    quiet = fused(Mlp)
    doubled = {name: 2 * it.detach() for name, it in quiet.named_parameters()}
    want = Mlp()
    want.load_state_dict(doubled)
    assert_close(torch.func.functional_call(quiet, doubled, (X,)), want(X), rtol=0, atol=0)
    assert_close(torch.func.vmap(quiet)(X), quiet(X))
