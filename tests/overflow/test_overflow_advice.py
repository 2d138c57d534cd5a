"""The suggestions of an overflow report."""

import pytest
import torch

from mpkernels.amp import GradScaler, find_nonfinite
from tests.overflow.test_find_nonfinite import Root, network

INF, NAN = float("inf"), float("nan")


def report_after(grads, scale=2.0**16, model=None, found=None):
    """Return the report on a skipped step of parameters that have these grads."""
    params = [(f"p{i}", torch.nn.Parameter(torch.ones(len(grad)))) for i, grad in enumerate(grads)]
    optimizer, scaler = torch.optim.SGD(params, lr=0.1), GradScaler("cpu", init_scale=scale, scaling="static")
    scaler.scale(torch.ones(()))
    for (_, param), grad in zip(params, grads, strict=True):
        param.grad = torch.tensor(grad)
    scaler.step(optimizer)
    scaler.update()
    return scaler.overflow_report(model, found)


SUGGESTIONS = {
    "Only infs: the scale of 65536 was too high.": {"grads": [[1.0, INF], [1.0]]},
    "NaN appears from p0 on, as where an inf meets a 0: the scale may be too high.": {
        "grads": [[1.0, NAN], [INF], [1.0]]
    },
    "Every gradient holds NaN, so the loss itself, or an input, is inf or NaN, unless the scale of 65536 is": {
        "grads": [[1.0, NAN], [NAN, INF]]
    },
    "Every gradient holds NaN, so the loss itself, or an input, is inf or NaN. Run a forward pass": {
        "grads": [[1.0, NAN], [NAN, INF]],
        "scale": 1.0,
    },
    "The loss scale is not to blame: look at p1 and what follows it in the forward pass.": {
        "grads": [[1.0, NAN], [INF], [1.0]],
        "scale": 1.0,
    },
}


@pytest.mark.parametrize(("text", "case"), SUGGESTIONS.items(), ids=SUGGESTIONS)
def test_the_suggestion_follows_from_the_grads(text, case):
    suggestion = report_after(**case).suggestion
    assert text in suggestion
    assert text in str(report_after(**case))
    assert [other for other in SUGGESTIONS if other in suggestion] == [text]


@pytest.mark.parametrize(
    ("inputs", "bias", "text"),
    [
        (1.0, -10.0, "1.1 (Root) was the first to give an inf or NaN, of finite inputs. In fp16, compute it in fp32 "),
        (1.0, NAN, "The weights of 0 (Linear) are not finite: an earlier step has spoiled them."),
        (
            NAN,
            0.0,
            "0 (Linear) was the first module to give an inf or NaN, and got it as an input: look at the data, and at "
            "what the model computes between its modules.",
        ),
        (0.0, 1.0, "Every module's output was finite: the loss, or the backward pass under too high a loss scale,"),
    ],
)
def test_the_suggestion_says_what_find_nonfinite_found(inputs, bias, text):
    model = network(Root())
    model[0].bias.data.fill_(bias)
    with find_nonfinite(model) as found:
        model(torch.full((2, 3), inputs))
    assert text in report_after([[NAN], [NAN]], model=model, found=found).suggestion
    assert "Every gradient" not in report_after([[NAN], [NAN]], found=found).suggestion
