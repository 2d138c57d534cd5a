"""Which forms of source are fused, and which are left because the fused op would compute something else."""

import functools

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.testing import assert_close

from mpkernels.nn import fuse, unfuse
from tests.networks import one_thread
from tests.nn.fusing.models import FORMS, InBranchAndLoop, Mlp, X, recorded_ops

__all__ = ["one_thread"]  # a fixture that each test uses


def results(model, x=X):
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = model(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(it.grad for it in model.parameters() if it.grad is not None)]


@pytest.mark.parametrize(("form", "ops"), FORMS.items(), ids=lambda it: getattr(it, "__name__", ""))
def test_a_form_is_fused(form, ops):
    model = form()
    want = results(model)
    report = fuse(model)
    assert type(model) is not form
    with recorded_ops() as ran:
        got = results(model)
    assert ran == ops
    reported = sorted(site.computed_by.split(",")[0] for site in report.fused if site.module == "")
    assert reported == sorted(set(ops))
    assert_close(got, want, rtol=1e-5, atol=1e-5)
    unfuse(model)
    assert type(model) is form
    with recorded_ops() as ran:
        assert_close(results(model), want, rtol=0, atol=0)
    assert ran == []


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore:.*should not be instantiated")  # of torch.compile
def test_a_form_is_compiled_and_traced(form):
    model = form()
    want = model(X)
    fuse(model)
    assert_close(torch.compile(model, backend="eager", fullgraph=True)(X), want, rtol=1e-5, atol=1e-5)
    if form is not InBranchAndLoop:  # which asks for the shape
        assert_close(torch.fx.symbolic_trace(model)(X), want, rtol=1e-5, atol=1e-5)
    torch.compiler.reset()


class HiddenIsUsedAgain(Mlp):
    def forward(self, x):
        h = self.fc1(x)
        y = self.act(h)
        return self.fc2(y) + h.sum()


class HiddenIsReturned(Mlp):
    def forward(self, x):
        h = self.fc1(x)
        y = self.act(h)
        return y, h


class HiddenIsCaptured(Mlp):
    def forward(self, x):
        h = self.fc1(x)
        later = lambda: h.sum()  # noqa: E731
        y = self.act(h)
        return y + later()


class HiddenIsKeptByTheLoop(Mlp):
    def forward(self, x):
        h = None
        for _ in range(2):
            if h is not None:
                x = x + h[..., :8]
            h = self.fc1(x)
            y = self.act(h)
        return y


class InputIsBoundAnew(Mlp):
    def forward(self, x):
        gate = self.act(self.fc1(x))
        x = self.norm(x)
        return gate * self.up(x)


class BoundByAnAugmentedAssignment(Mlp):
    def forward(self, x):
        x = self.fc1(x)
        x += self.act(x)
        return x


class ChangedInBetween(Mlp):
    def forward(self, x):
        h = self.fc1(x)
        h += 1
        return self.act(h)


class StatementInBetween(Mlp):
    def forward(self, x):
        h = self.fc1(x)
        self.act = nn.ReLU()
        return self.act(h)


class BoundInsideAnExpression(Mlp):
    def forward(self, x):
        _ = self.fc1(h := self.norm(x))
        return self.act(h)


class NamesAreRead(Mlp):
    def forward(self, x):
        h = self.fc1(x)
        y = self.act(h)
        return y + locals()["h"]


class SameNameForAnotherInput(Mlp):
    def __init__(self):
        super().__init__()
        self.fc1, self.up = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = self.act(self.fc1(x))
        return x * self.up(x)


class ReadAfterAnError(Mlp):
    def forward(self, x):
        try:
            x = self.fc1(x)
            x = self.act(x)
        finally:
            self.seen = x
        return x


class TheGateItself(Mlp):
    def forward(self, x):
        h = self.fc1(x)
        return h.tanh() * h


class UpIsActivated(Mlp):
    def forward(self, x):
        up, gate = self.packed(x).chunk(2, dim=-1)
        return self.act(gate) * up


class AnotherChunk(Mlp):
    def forward(self, x):
        gate, up = self.packed(x).chunk(2, dim=1)
        return self.act(gate) * up if up.shape == gate.shape else gate


class Local(Mlp):
    def forward(self, x):
        torch = nn.Sequential()
        torch.relu = nn.GELU()
        return torch.relu(self.fc1(x))


class Super(Mlp):
    def forward(self, x):
        return super().forward(x) + self.act(self.fc1(x)).sum()


class Decorated(Mlp):
    @torch.no_grad()
    def forward(self, x):
        return self.act(self.fc1(x))


def _doubled(forward):
    def double(self, x):
        return 2 * forward(self, x)

    return double


class WrappedSilently(Mlp):
    forward = _doubled(Mlp.forward)


class OfGlobals(Mlp):
    exec("def forward(self, x):\n    return self.act(self.fc1(x))")


class OwnActivation(nn.GELU):
    def forward(self, x):
        return 2 * super().forward(x)


class Unknown(Mlp):
    def __init__(self):
        super().__init__()
        self.act = nn.ELU()


class Subclassed(Mlp):
    def __init__(self):
        super().__init__()
        self.act = OwnActivation()


class OtherLinear(Mlp):
    def __init__(self):
        super().__init__()
        self.fc1 = type("Own", (nn.Linear,), {"forward": lambda self, x: 2 * nn.Linear.forward(self, x)})(8, 16)

    def forward(self, x):
        return self.act(self.fc1(x))


LEFT = {
    HiddenIsUsedAgain: "its forward applies no",
    HiddenIsReturned: "its forward applies no",
    HiddenIsCaptured: "its forward applies no",
    HiddenIsKeptByTheLoop: "its forward applies no",
    InputIsBoundAnew: None,
    BoundByAnAugmentedAssignment: "its forward applies no",
    ChangedInBetween: "its forward applies no",
    StatementInBetween: "its forward applies no",
    BoundInsideAnExpression: "its forward applies no",
    NamesAreRead: "its forward applies no",
    SameNameForAnotherInput: None,
    ReadAfterAnError: "its forward applies no",
    TheGateItself: "its forward applies no",
    UpIsActivated: "its forward applies no",
    AnotherChunk: "its forward applies no",
    Local: "its forward applies no",
    Super: "its forward is a closure, or calls super()",
    Decorated: "its forward is decorated, or no Python function",
    WrappedSilently: "its forward is a closure, or calls super()",
    OfGlobals: "its forward has no source",
    Unknown: "act is no activation that mpkernels knows",
    Subclassed: "its forward applies no",
    OtherLinear: "fc1 is no plain torch.nn.Linear",
}


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


class OneLayerForGateAndUp(Mlp):
    def forward(self, x):
        return self.act(self.fc1(x)) * self.fc1(x)


class AnotherDropout(Mlp):
    def forward(self, x):
        return self.fc2(F.alpha_dropout(self.act(self.fc1(x)), p=self.rate, training=self.training))


@pytest.mark.parametrize("form", [OneLayerForGateAndUp, AnotherDropout])
def test_a_part_is_fused(form):
    model = form()
    want = results(model)
    fuse(model)
    with recorded_ops() as ran:
        assert_close(results(model), want, rtol=1e-5, atol=1e-5)
    assert ran == ["linear_act"]


def test_what_differs_from_its_source_is_left():
    """As after an edit of the file, or where a tool has changed the function."""

    class Changed(Mlp):
        def forward(self, x):
            return self.act(self.fc1(x)) * 2.0

    code = Changed.forward.__code__
    Changed.forward.__code__ = code.replace(co_consts=tuple(3.0 if it == 2.0 else it for it in code.co_consts))
    [site] = fuse(Changed()).left
    assert site.reason == "its forward runs other code than its source says"


def test_a_forward_of_the_instance_is_left():
    model = Mlp()
    model.forward = functools.partial(Mlp.forward, model)
    [site] = fuse(model).left
    assert site.reason == "its forward was replaced on this instance"
    assert_close(model(X), Mlp.forward(model, X), rtol=0, atol=0)


def test_the_other_part_of_a_site_is_fused_where_one_layer_is_not_plain():
    model = Mlp()
    model.fc2.register_forward_hook(lambda module, arguments, output: 2 * output)
    assert [site.stood_there for site in fuse(model).fused] == ["act(fc1(x))"]


def test_functions_of_torch_are_looked_up_in_each_call():
    model = FORMS_BY_NAME["TorchFunction"]()
    fuse(model)
    with recorded_ops() as ran, pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "relu", F.elu)
        got = model(X)
    assert ran == []
    assert_close(got, model.fc2(F.elu(model.fc1(X))), rtol=0, atol=0)


FORMS_BY_NAME = {form.__name__: form for form in FORMS}
