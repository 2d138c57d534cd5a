"""fuse takes the MLPs of timm and diffusers as whole MLPs: it looks through identities and dropouts, and into loops."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from mpkernels import selector
from mpkernels.nn import fuse, unfuse
from tests.nn.fusing import as_diffusers
from tests.nn.fusing.feed_forwards import KINDS, FeedForward, TimmGluMlp, TimmMlp, X, made, results
from tests.nn.fusing.models import recorded_ops


@pytest.mark.parametrize("name", KINDS)
def test_only_the_hidden_layer_is_saved_for_the_backward(name):
    model, op = made(name), KINDS[name][1]
    report = fuse(model)
    selector.pin("native")
    try:
        plain, fused = report.saved_bytes(X)
    finally:
        selector.pin(None)
    hidden = X.nbytes * 2
    z = {"mlp": 1, "gated_mlp": 2}[op]
    are_shared = name in ("a loop", "a sequence")  # ReLU and Tanh save their result, which the last layer takes, too
    assert plain - fused == (0 if are_shared else z * hidden)
    if name != "a loop":  # a loop saves more for its norm
        assert fused == X.nbytes + z * hidden


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", KINDS)
def test_under_autocast_a_fused_model_is_at_least_as_near_to_fp64(name, dtype):
    """This holds for y and all gradients. The inputs fit into 16 bits, and the rows are too many for luck to decide:
    where a CPU multiplies 16-bit matrices, both ways round equally often."""
    x, dy = (torch.randn(1024, 8, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in (0, 1))

    def rounded():
        model = made(name)
        for param in model.parameters():
            param.data = param.to(dtype).float()
        return model

    want = results(rounded().double(), x.double(), dy)
    errors = []
    for is_fused in (False, True):
        model = rounded()
        if is_fused:
            fuse(model)
        with torch.autocast("cpu", dtype), recorded_ops() as ran:
            got = results(model, x.float(), dy)
        assert ran == [KINDS[name][1]] * is_fused
        errors.append([((y - exact).norm() / exact.norm()).item() for y, exact in zip(got, want, strict=True)])
    for plain_error, fused_error in zip(*errors, strict=True):
        assert fused_error <= 1.02 * plain_error + torch.finfo(dtype).eps / 8


@pytest.mark.parametrize("name", KINDS)
def test_the_dropout_draws_by_its_p_and_mode_in_each_call(name):
    """The last layer returns the hidden features, so that the test sees which were dropped."""
    model = made(name).eval()
    last = [it for it in model.modules() if isinstance(it, nn.Linear)][-1]
    dropout = next(it for it in model.modules() if isinstance(it, nn.Dropout))
    last.weight, last.bias = nn.Parameter(torch.eye(16)), None
    if name == "a loop":  # without its residual, which has another shape
        model = nn.Sequential(*model.layers)
    fuse(model)
    hidden = model(X)
    model.train()
    assert_close(model(X), hidden, rtol=1e-5, atol=1e-6)
    for p in (0.5, 0.25):
        dropout.p = p
        with recorded_ops() as ran:
            torch.manual_seed(1)
            y = model(X)
            torch.manual_seed(1)
            assert torch.equal(model(X), y)
        assert ran == [KINDS[name][1]] * 2
        is_kept = y != 0
        assert_close(y[is_kept], hidden[is_kept] / (1 - p), rtol=1e-5, atol=1e-6)
        assert abs(1 - is_kept[hidden != 0].float().mean() - p) < 0.15  # 4 deviations of 240 draws
    dropout.p = 1.0
    assert not model(X).any()
    dropout.eval()
    assert_close(model(X), hidden, rtol=1e-5, atol=1e-6)
    model.eval()
    dropout.train()  # a dropout goes by its own mode, not by the model's
    with recorded_ops() as ran:
        assert not model(X).any()
    assert ran == [KINDS[name][1]]


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_a_checkpoint_gives_the_same_grads(name, use_reentrant):
    model = made(name, drop=0.5)
    fuse(model)
    grads = []
    for run in (model, lambda x: checkpoint(model, x, use_reentrant=use_reentrant)):
        torch.manual_seed(1)
        model.zero_grad()
        run(X.clone().requires_grad_()).square().sum().backward()
        grads.append([it.grad for it in model.parameters()])
    assert_close(grads[1], grads[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", KINDS)
def test_an_input_that_is_no_tensor_gets_the_error_of_the_plain_model(name):
    errors = []
    for is_fused in (False, True):
        model = made(name)
        if is_fused:
            fuse(model)
        with pytest.raises(TypeError) as error:
            model("text")
        errors.append(str(error.value))
    assert errors[0] == errors[1]


class MadeOfConvolutions(TimmMlp):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Conv1d(5, 16, 1), nn.Conv1d(16, 5, 1)


def with_another_forward():
    model = TimmMlp()
    model.forward = lambda x, forward=model.forward: forward(x) * 2
    return model


LEFT = {
    "a forward that an instance got": (with_another_forward, "was replaced on this instance"),
    "1 x 1 convolutions": (MadeOfConvolutions, "fc1 is no plain torch.nn.Linear"),
    "a list of convolutions": (
        lambda: nn.Sequential(nn.Conv1d(5, 4, 1), nn.ReLU(), nn.Conv1d(4, 5, 1)),
        "Conv1d is no plain torch.nn.Linear",
    ),
    "gate on either side": (TimmGluMlp, "its forward applies no activation to the output of a linear layer in a form"),
    "another GELU": (
        lambda: FeedForward(as_diffusers.ApproximateGELU),
        "ApproximateGELU is none of the modules that fuse takes apart into a layer and an activation",
    ),
}


@pytest.mark.parametrize(("make", "reason"), LEFT.values(), ids=LEFT)
def test_an_mlp_of_another_kind_is_left_with_a_reason(make, reason):
    model = make()
    want = results(model)
    report = fuse(model)
    assert report.fused == []
    assert any(site.module == "" and reason in site.reason for site in report.left), str(report)
    assert_close(results(model), want, rtol=0, atol=0)


class FourBetween(TimmMlp):
    def forward(self, x):
        x = self.norm(self.norm(self.act(self.fc1(x))))
        return self.fc2(self.norm(self.norm(x)))


class FiveBetween(TimmMlp):
    def forward(self, x):
        x = self.norm(self.norm(self.norm(self.act(self.fc1(x)))))
        return self.fc2(self.norm(self.norm(x)))


@pytest.mark.parametrize(("kind", "computed_by"), [(FourBetween, "mlp, gelu"), (FiveBetween, "linear_act, gelu")])
def test_fuse_looks_through_four_calls_and_no_more(kind, computed_by):
    assert [site.computed_by for site in fuse(kind()).fused] == [computed_by]


def test_an_mlp_with_two_active_dropouts_is_fused_only_in_part():
    class Twice(TimmMlp):
        def forward(self, x):
            return self.fc2(self.drop2(self.drop1(self.act(self.fc1(x)))))

    model = Twice(drop=0.5)
    model.drop2.p = 0.5
    assert [site.stood_there for site in fuse(model).fused] == ["act(fc1(x))"]
    unfuse(model)
    model.drop1.p = 0.0
    assert [site.computed_by for site in fuse(model).fused] == ["mlp, gelu"]
    model.drop1.p = 0.5  # from now on both drop
    with recorded_ops() as ran:
        torch.manual_seed(1)
        got = model(X)
    assert ran == []
    unfuse(model)
    torch.manual_seed(1)
    assert torch.equal(got, model(X))
