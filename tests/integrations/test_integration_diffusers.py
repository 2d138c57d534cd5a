"""fuse on diffusers' FeedForward, against the real library: alone, in blocks and in whole models. Its averages."""

import copy
import pickle
import warnings
from functools import partial

import pytest
import torch
from torch.testing import assert_close

from mpkernels.nn import fuse, unfuse
from mpkernels.optim import SGD, TrueWeights
from tests.nn.fusing.feed_forwards import X, results
from tests.nn.fusing.models import assert_computes, recorded_ops

pytest.importorskip("diffusers", reason="needs the extra integrations")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from diffusers import DiTTransformer2DModel, FluxTransformer2DModel
    from diffusers.models.attention import BasicTransformerBlock, FeedForward
    from diffusers.training_utils import EMAModel

pytestmark = pytest.mark.filterwarnings("ignore")  # the libraries' own
OPS = {"gelu": "mlp", "gelu-approximate": "mlp", "linear-silu": "mlp", "geglu": "gated_mlp", "swiglu": "gated_mlp"}
NOT_OURS = "geglu-approximate"  # x * sigmoid(1.702 * x)


def feed_forward(activation, **options):
    torch.manual_seed(0)
    return FeedForward(8, mult=2, activation_fn=activation, **options)


@pytest.mark.parametrize("final_dropout", [False, True])
@pytest.mark.parametrize("activation", OPS)
def test_a_feed_forward_becomes_one_mlp(activation, final_dropout):
    model = feed_forward(activation, final_dropout=final_dropout)
    keys, want = list(model.state_dict()), results(model)
    report = fuse(model)
    assert [(site.module, site.computed_by.split(",")[0]) for site in report.fused] == [("", OPS[activation])]
    assert report.left == []
    for copied in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_computes(partial(results, copied), want, [OPS[activation]])
    assert list(model.state_dict()) == keys
    unfuse(model)
    assert_close(results(model), want, rtol=0, atol=0)


def test_another_activation_is_left_with_a_reason():
    model = feed_forward(NOT_OURS)
    want = results(model)
    report = fuse(model)
    assert report.fused == []
    assert ("net: ApproximateGELU, Dropout, Linear", True) in [
        (site.stood_there, "is none of the modules that fuse takes apart into a layer and an activation" in site.reason)
        for site in report.left
    ]
    assert_close(results(model), want, rtol=0, atol=0)


def block(activation):
    return BasicTransformerBlock(8, 2, 4, activation_fn=activation), (X,)


def dit():
    sizes = {"sample_size": 4, "in_channels": 2, "patch_size": 2, "num_embeds_ada_norm": 4, "norm_num_groups": 1}
    model = DiTTransformer2DModel(num_attention_heads=2, attention_head_dim=4, num_layers=2, **sizes)
    torch.nn.init.normal_(model.proj_out_2.weight)
    return model, (torch.randn(2, 2, 4, 4), torch.tensor([1, 2]), torch.tensor([0, 3]))


def flux():
    sizes = {"patch_size": 1, "in_channels": 4, "num_layers": 2, "num_single_layers": 1, "attention_head_dim": 16}
    widths = {
        "num_attention_heads": 2,
        "joint_attention_dim": 8,
        "pooled_projection_dim": 8,
        "axes_dims_rope": (4, 4, 8),
    }
    model = FluxTransformer2DModel(**sizes, **widths)
    inputs = torch.randn(1, 4, 4), torch.randn(1, 3, 8), torch.randn(1, 8), torch.tensor([1.0])
    return model, (*inputs, torch.zeros(4, 3), torch.zeros(3, 3))


MODELS = {
    "a block of Stable Diffusion": (lambda: block("geglu"), ["gated_mlp"]),
    "a block with GELU": (lambda: block("gelu"), ["mlp"]),
    "DiT": (dit, ["mlp"] * 2),
    "Flux": (flux, ["mlp"] * 5 + ["linear_act"]),
}


@pytest.mark.parametrize(("make", "ops"), MODELS.values(), ids=MODELS)
def test_a_model_computes_the_same(make, ops):
    torch.manual_seed(0)
    model, inputs = make()

    def computed():
        model.zero_grad()
        torch.manual_seed(1)
        y = model(*inputs)
        y = y if isinstance(y, torch.Tensor) else y[0]
        y.square().mean().backward()
        return [y.detach(), *(it.grad for it in model.parameters() if it.grad is not None)]

    want = computed()
    fuse(model)
    with recorded_ops() as ran:
        got = computed()
    assert ran == ops
    assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("foreach", [False, True])
def test_its_average_takes_true_weights(foreach):
    """It ends as torch's average of fp32 weights does. In bf16 it would stand still."""
    param = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    optimizer = SGD([param], lr=1 / 300)
    weights = TrueWeights(torch.nn.ParameterList([param]), optimizer)
    average = EMAModel(weights.parameters(), decay=0.999, min_decay=0.999, foreach=foreach)
    for _ in range(300):
        param.grad = torch.ones_like(param)
        optimizer.step()
        average.step(weights.parameters())
    assert average.shadow_params[0].item() == pytest.approx(0.861, abs=1e-4)
