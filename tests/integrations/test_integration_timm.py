"""fuse on timm's MLPs, against the real library. It isn't among the extras: it imports torchvision, which PyPI has for
torch's CUDA build alone."""

import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from mpkernels.nn import fuse, unfuse
from tests.nn.fusing.feed_forwards import X, results
from tests.nn.fusing.models import assert_computes, compiled, recorded_ops

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    try:
        import timm
    except (ImportError, RuntimeError) as error:  # of torchvision, whose ops are missing
        pytest.skip(f"needs timm: {error}", allow_module_level=True)
    from timm.layers import GatedMlp, GluMlp, Mlp, SwiGLU

pytestmark = pytest.mark.filterwarnings("ignore")  # the library's own
OPS = {Mlp: "mlp", GatedMlp: "mlp", SwiGLU: "gated_mlp"}


@pytest.mark.parametrize("kind", OPS)
def test_an_mlp_becomes_one_op(kind):
    torch.manual_seed(0)
    model = kind(8, 16, drop=0.0)
    want = results(model)
    assert [site.computed_by.split(",")[0] for site in fuse(model).fused] == [OPS[kind]]
    assert_computes(partial(results, model), want, [OPS[kind]])
    run, graphs = compiled(model)
    assert_close(run(X), want[0], rtol=1e-5, atol=1e-5)
    assert "mpkernels." in "".join(graphs)
    torch.compiler.reset()
    unfuse(model)
    assert type(model) is kind
    assert_close(results(model), want, rtol=0, atol=0)


def test_an_mlp_with_a_norm_or_a_gated_linear_unit_is_no_mlp_of_ours():
    assert [site.computed_by for site in fuse(Mlp(8, 16, norm_layer=nn.LayerNorm)).fused] == ["linear_act, gelu"]
    [site] = fuse(GluMlp(8, 16)).left
    assert site.stood_there == "GluMlp"


SMALL = {"depth": 2, "embed_dim": 32, "num_heads": 2}
MODELS = {
    "vit_tiny_patch16_224": (SMALL, 2),
    "deit3_small_patch16_224": (SMALL, 2),
    "beit_base_patch16_224": (SMALL, 2),
    "mixer_s32_224": ({}, 16),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_computes_the_same(name):
    torch.manual_seed(0)
    sizes, count = MODELS[name]
    model = timm.create_model(name, img_size=32, num_classes=3, **sizes)
    x = torch.randn(2, 3, 32, 32)
    want = results(model, x)
    assert len(fuse(model).fused) == count
    with recorded_ops() as ran:
        got = results(model, x)
    assert ran == ["mlp"] * count
    assert_close(got, want, rtol=1e-3, atol=1e-4)
