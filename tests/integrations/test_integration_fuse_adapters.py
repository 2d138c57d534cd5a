"""Adapters and quantisers on the layers of a fused model, against the real libraries: they compute what they compute on
the plain model, whether they come before fuse or after."""

import warnings

import pytest
import torch
from torch.testing import assert_close

from mpkernels import selector
from mpkernels.nn import fuse
from tests.nn.fusing.models import recorded_ops

for library in ("transformers", "peft", "torchao"):
    pytest.importorskip(library, reason="needs the extra integrations")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from peft import IA3Config, LoraConfig, get_peft_model
    from torchao.float8 import convert_to_float8_training
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    from tests.integrations.test_integration_fuse import model

pytestmark = pytest.mark.filterwarnings("ignore")  # the libraries' own
TOKENS = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0))


def gpt2():
    return model("gpt2")[0]


def llama():
    return model("llama")[0]


def with_peft(kind, **options):
    def adapt(model):
        torch.manual_seed(1)
        return get_peft_model(model, kind(**options))

    return adapt


LORA = {"r": 4, "init_lora_weights": False}
ALL_OF_LLAMA = {"target_modules": ["gate_proj", "up_proj", "down_proj"]}
ADAPTERS = {
    "LoRA, gpt2": (gpt2, with_peft(LoraConfig, target_modules=["c_fc", "c_proj"], fan_in_fan_out=True, **LORA), []),
    "LoRA, llama": (llama, with_peft(LoraConfig, **ALL_OF_LLAMA, **LORA), []),
    "LoRA, llama's gate": (llama, with_peft(LoraConfig, target_modules=["gate_proj"], **LORA), []),
    "LoRA, attention": (llama, with_peft(LoraConfig, target_modules=["q_proj", "v_proj"], **LORA), ["gated_mlp"] * 2),
    "DoRA, llama": (llama, with_peft(LoraConfig, use_dora=True, **ALL_OF_LLAMA, **LORA), []),
    "IA3, llama": (
        llama,
        with_peft(IA3Config, target_modules=["down_proj"], feedforward_modules=["down_proj"], init_ia3_weights=False),
        None,
    ),
    "LoRA on parameters": (
        llama,
        with_peft(LoraConfig, target_modules=[], target_parameters=["mlp.up_proj.weight"], **LORA),
        [],
    ),
}


def results(model):
    model.zero_grad()
    logits = model(TOKENS).logits
    logits.square().mean().backward()
    return [logits.detach(), *(it.grad for it in model.parameters() if it.grad is not None)]


@pytest.mark.parametrize("is_first", [True, False], ids=["fused first", "fused last"])
@pytest.mark.parametrize("kernel", ["native", "torch"])
@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters(name, kernel, is_first):
    selector.pin(kernel)
    make, adapt, ops = ADAPTERS[name]
    want = results(adapt(make()))
    model = make()
    if is_first:
        fuse(model)
        model(TOKENS)  # what computes is kept now
    model = adapt(model)
    if kernel == "torch":
        assert_close(results(model), want, rtol=0, atol=0)
    selector.pin("native")
    fuse(model)
    with recorded_ops() as ran:
        got = results(model)
    exact = ran == []
    assert_close(got, want, rtol=0 if exact else 1e-5, atol=0 if exact else 1e-6)
    if is_first and ops is not None:
        assert ran == ops


def test_a_merged_adapter_leaves_the_fused_op():
    model = llama()
    fuse(model)
    adapted = ADAPTERS["LoRA, llama"][1](model)
    want = adapted(TOKENS).logits
    merged = adapted.merge_and_unload()
    with recorded_ops() as ran:
        assert_close(merged(TOKENS).logits, want, rtol=1e-4, atol=1e-5)
    assert ran == ["gated_mlp"] * 2


def to_int8(model):
    quantize_(model, Int8WeightOnlyConfig())
    return model


def to_float8(model):
    return convert_to_float8_training(model, module_filter_fn=lambda module, name: "mlp" in name)


@pytest.mark.parametrize("is_first", [True, False], ids=["fused first", "fused last"])
@pytest.mark.parametrize("convert", [to_int8, to_float8])
def test_quantised_layers(convert, is_first):
    want = convert(llama())(TOKENS).logits
    model = llama()
    fuse(model if is_first else torch.nn.Identity())
    model = convert(model)
    report = fuse(model)
    assert is_first or report.fused == []
    with recorded_ops() as ran:
        assert_close(model(TOKENS).logits, want, rtol=0, atol=0)
    assert ran == []
