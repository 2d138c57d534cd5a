"""fuse fuses some forms of source, and leaves others, for which the fused op would compute something else."""

from functools import partial

import pytest
import torch
from torch.testing import assert_close

from mpkernels.nn import fuse, unfuse
from tests.nn.fusing.feed_forwards import KINDS, made, results
from tests.nn.fusing.forms_left_alone import LEFT
from tests.nn.fusing.models import FORMS, InBranchAndLoop, Mlp, X, assert_computes, compiled, recorded_ops

EVERY_FORM = {form.__name__: (form, ops) for form, ops in FORMS.items()} | {
    name: (partial(made, name), [op]) for name, (_, op) in KINDS.items()
}
every_form = pytest.mark.parametrize(("form", "ops"), EVERY_FORM.values(), ids=EVERY_FORM)


@every_form
def test_a_form_is_fused(form, ops):
    model = form()
    classes, keys, want = [type(it) for it in model.modules()], list(model.state_dict()), results(model)
    report = fuse(model)
    assert type(model) is not classes[0]
    with recorded_ops() as ran:
        got = results(model)
    assert ran == ops
    assert list(model.state_dict()) == keys
    reported = sorted(site.computed_by.split(",")[0] for site in report.fused if site.module == "")
    assert reported == sorted(set(ops))
    assert form in FORMS or (len(report.fused), report.left) == (1, [])
    assert_close(got, want, rtol=1e-5, atol=1e-5)
    unfuse(model)
    assert [type(it) for it in model.modules()] == classes
    assert_computes(partial(results, model), want, [])


@pytest.mark.exhaustive
@every_form
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of torch.compile
def test_a_form_is_compiled_and_traced(form, ops):
    model = form()
    want = results(model)
    fuse(model)
    run, graphs = compiled(model)
    for mine, plain in zip(results(run), want, strict=True):
        assert_close(mine, plain, rtol=1e-5, atol=1e-5)
    first = {"mlp": "linear_act", "gated_mlp": "linear_gated", "gated_linear": "linear_gated"}
    for op in ops:
        assert f"mpkernels.{first.get(op, op)}.default(" in "".join(graphs)
    if form in FORMS and form is not InBranchAndLoop:  # whose forward asks for the shape
        assert_close(torch.fx.symbolic_trace(model)(X), want[0], rtol=1e-5, atol=1e-5)
    torch.compiler.reset()


@pytest.mark.parametrize(("form", "reason"), LEFT.items(), ids=lambda it: getattr(it, "__name__", ""))
def test_a_form_is_left_with_a_reason(form, reason):
    model = form()
    want = model(X)
    report = fuse(model)
    assert_close(model(X), want, rtol=0 if reason else 1e-5, atol=0 if reason else 1e-6)
    if reason is not None:
        assert type(model) is form
        assert report.fused == []
        assert [site.reason for site in report.left] == [site.reason for site in report.left if reason in site.reason]
        assert len(report.left) == 1


class InElseExceptAndCase(Mlp):
    def forward(self, x):
        if x.ndim == 2:
            x = -x
        else:
            h = self.act(self.fc1(x))
            x = self.fc2(h)
        try:
            raise KeyError
        except KeyError:
            k = self.act(self.fc1(x))
            x = self.fc2(k)
        match x.ndim:
            case 3:
                m = self.act(self.fc1(x))
                x = self.fc2(m)
        return x


def test_every_branch_is_fused():
    model = InElseExceptAndCase()
    want = model(X)
    fuse(model)
    assert_computes(model, want, ["mlp"] * 3)


@pytest.mark.parametrize("constant", [3.0, 2], ids=["another number", "an equal one"])
def test_a_forward_that_differs_from_its_source_is_left(constant):
    """The file may have been edited, or a tool may have changed the function."""

    class Changed(Mlp):
        def forward(self, x):
            return self.act(self.fc1(x)) * 2.0

    code = Changed.forward.__code__
    Changed.forward.__code__ = code.replace(co_consts=tuple(constant if it == 2.0 else it for it in code.co_consts))
    [site] = fuse(Changed()).left
    assert site.reason == "its forward runs other code than its source says"


def test_if_the_last_layer_has_a_hook_the_first_is_fused_with_its_activation():
    model = Mlp()
    model.fc2.register_forward_hook(lambda module, arguments, output: 2 * output)
    assert [site.stood_there for site in fuse(model).fused] == ["act(fc1(x))"]
