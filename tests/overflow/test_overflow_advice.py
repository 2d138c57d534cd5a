"""What an overflow report suggests."""

import pytest
import torch

from mpkernels.amp import GradScaler, find_nonfinite
from tests.networks import F16, one_thread
from tests.overflow.test_find_nonfinite import Root, network

__all__ = ["one_thread"]  # a fixture that each test uses

INF, NAN = float("inf"), float("nan")


def report_after(grads, scale=2.0**16, skips=1, model=None, found=None, dtype=torch.float32):
    """Of parameters that have these grads."""
    params = [(f"p{i}", torch.nn.Parameter(torch.ones(len(grad), dtype=dtype))) for i, grad in enumerate(grads)]
    optimizer, scaler = torch.optim.SGD(params, lr=0.1), GradScaler("cpu", init_scale=scale, scaling="static")
    for _ in range(skips):
        scaler.scale(torch.ones(()))
        for (_, param), grad in zip(params, grads, strict=True):
            param.grad = torch.tensor(grad, dtype=dtype)
        scaler.step(optimizer)
        scaler.update()
    return scaler.overflow_report(model, found)


SUGGESTIONS = {
    "Only infs: the scale of 65536 was too high.": {"grads": [[1.0, INF], [1.0]]},
    "It was skip 5 in a row: a lower init_scale would save them.": {"grads": [[1.0, INF], [1.0]], "skips": 5},
    "NaN appears from p0 on, as where an inf meets a 0: the scale may be too high.": {
        "grads": [[1.0, NAN], [INF], [1.0]]
    },
    "Every gradient holds NaN, so the loss itself, or an input, is inf or NaN, and no scale will help": {
        "grads": [[1.0, NAN], [NAN, INF]]
    },
    "At a scale of 1 it is not the scale: look at p1 and what follows it": {
        "grads": [[1.0, NAN], [INF], [1.0]],
        "scale": 1.0,
    },
    "75% of the elements are 0: if they underflow while others overflow, no scale fits all, but bf16 would.": {
        "grads": [[INF], [0.0] * 3]
    },
    "75% of the elements are 0: unless they belong there, as in embeddings, they underflow, and": {
        "grads": [[NAN], [0.0] * 3]
    },
}


@pytest.mark.parametrize(("text", "seen"), SUGGESTIONS.items(), ids=SUGGESTIONS)
def test_suggestions(text, seen):
    suggestion = report_after(**seen).suggestion
    assert text in suggestion
    assert text in str(report_after(**seen))
    others = [other for other in SUGGESTIONS if other != text and other in suggestion]
    beside = {"It was skip 5": "Only infs", "75% of the elements are 0: if": "Only infs", "75%": "NaN appears"}
    allowed = next((other for start, other in beside.items() if text.startswith(start)), "nothing else")
    assert all(other.startswith(allowed) for other in others), others


class Norm(torch.nn.Module):
    def __init__(self, eps):
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.ones(3)), eps

    def forward(self, x):
        return x * (x.square().mean() + self.eps).rsqrt() * self.weight


@pytest.mark.parametrize(
    ("layer", "text"),
    [
        (Norm(1e-8), "eps of 0 is 0 in fp16, whose smallest number is 6e-08: raise it."),
        (Norm(1e-6), "eps of 0 is below fp16's normal range, 6.1e-05: raise it, or compute in fp32."),
        (torch.nn.LayerNorm(3, eps=1e-12), "eps of 0 is 0 in fp16, whose smallest number is 6e-08: raise it."),
        (torch.nn.LayerNorm(3), None),  # computes in fp32
        (Norm(1e-3), None),
        (torch.nn.Linear(3, 3), None),
    ],
    ids=str,
)
def test_layers_whose_eps_fp16_cannot_hold(layer, text):
    model = torch.nn.Sequential(layer)
    assert "eps" not in report_after([[INF]], model=model.float()).suggestion
    suggestion = report_after([[INF]], model=model.half(), dtype=F16).suggestion
    assert text in suggestion if text else "eps" not in suggestion


@pytest.mark.parametrize(
    ("inputs", "bias", "text"),
    [
        (1.0, -10.0, "1.1 (Root) was the first to give an inf or NaN, of finite inputs: compute it in fp32 or bf16."),
        (1.0, NAN, "The weights of 0 (Linear) are not finite: an earlier step has spoiled them."),
        (NAN, 0.0, "0 (Linear) was the first module to give an inf or NaN, and got it as an input: look at the data."),
        (0.0, 1.0, "Every module's output was finite: the loss or the backward pass made the first inf or NaN."),
    ],
)
def test_what_was_found_in_the_forward_pass(inputs, bias, text):
    model = network(Root())
    model[0].bias.data.fill_(bias)
    with find_nonfinite(model) as found:
        model(torch.full((2, 3), inputs))
    assert text in report_after([[NAN], [NAN]], model=model, found=found).suggestion
    assert "Every gradient" not in report_after([[NAN], [NAN]], found=found).suggestion
