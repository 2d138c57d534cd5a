"""fuse on models of transformers, against the real library: tiny random instances, made of a config."""

import copy
import pickle
import warnings

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing import assert_close

from mpkernels import selector
from mpkernels.nn import fuse, unfuse
from tests.nn.fusing.models import recorded_ops
from tests.processes import alone

pytest.importorskip("transformers", reason="needs the extra integrations")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own

TOKENS = torch.randint(3, 60, (2, 7), generator=torch.Generator().manual_seed(0))
PIXELS = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
SOUND = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(0))
TEXT = {"input_ids": TOKENS}
BOTH = {"input_ids": TOKENS, "decoder_input_ids": TOKENS}
LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
BERT = {name: value for name, value in LLAMA.items() if name not in ("num_key_value_heads", "head_dim")}
DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
BERT |= DROPOUT
IMAGES = {name: BERT[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")} | DROPOUT
IMAGES |= {"intermediate_size": 48, "image_size": 16, "patch_size": 8}
T5 = {"d_model": 32, "d_ff": 48, "d_kv": 16, "num_layers": 2, "num_heads": 2, "vocab_size": 64, "dropout_rate": 0.0}
MODERN = {"attention_dropout": 0.0, "embedding_dropout": 0.0, "mlp_dropout": 0.0, "global_attn_every_n_layers": 1}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 64, "n_positions": 32, "bos_token_id": 1}
GPT2 |= {"eos_token_id": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
DISTIL = {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 2, "vocab_size": 64, "dropout": 0.0}
OPT = {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}
OPT |= {"word_embed_proj_dim": 32, "dropout": 0.0, "max_position_embeddings": 32, "bos_token_id": 1, "pad_token_id": 0}
WHISPER = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "vocab_size": 64}
WHISPER |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_mel_bins": 8}
WHISPER |= {"max_source_positions": 8, "max_target_positions": 16, "dropout": 0.0, "pad_token_id": 0}
WHISPER |= {"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "suppress_tokens": None}
PHI = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attention_dropout": 0.0}
MODELS = {
    "gpt2": ("GPT2LMHeadModel", GPT2, TEXT),
    "bert": ("BertForMaskedLM", BERT, TEXT),
    "roberta": ("RobertaForMaskedLM", BERT, TEXT),
    "distilbert": ("DistilBertForMaskedLM", DISTIL | {"attention_dropout": 0.0}, TEXT),
    "llama": ("LlamaForCausalLM", LLAMA, TEXT),
    "mistral": ("MistralForCausalLM", LLAMA, TEXT),
    "qwen2": ("Qwen2ForCausalLM", LLAMA, TEXT),
    "qwen3": ("Qwen3ForCausalLM", LLAMA, TEXT),
    "phi": ("PhiForCausalLM", LLAMA | PHI, TEXT),
    "phi3": ("Phi3ForCausalLM", LLAMA | PHI, TEXT),
    "vit": ("ViTForImageClassification", IMAGES, {"pixel_values": PIXELS}),
    "dinov2": ("Dinov2ForImageClassification", IMAGES, {"pixel_values": PIXELS}),
    "dinov2 swiglu": ("Dinov2ForImageClassification", IMAGES | {"use_swiglu_ffn": True}, {"pixel_values": PIXELS}),
    "gemma": ("GemmaForCausalLM", LLAMA, TEXT),
    "gemma2": ("Gemma2ForCausalLM", LLAMA, TEXT),
    "gemma3": ("Gemma3ForCausalLM", LLAMA, TEXT),
    "t5": ("T5ForConditionalGeneration", T5, BOTH),
    "t5 v1.1": ("T5ForConditionalGeneration", T5 | {"feed_forward_proj": "gated-gelu"}, BOTH),
    "opt": ("OPTForCausalLM", OPT, TEXT),
    "whisper": ("WhisperForConditionalGeneration", WHISPER, {"input_features": SOUND, "decoder_input_ids": TOKENS}),
    "modernbert": ("ModernBertForMaskedLM", LLAMA | MODERN, TEXT),
    "gpt neox": ("GPTNeoXForCausalLM", BERT, TEXT),
    "nemotron": ("NemotronForCausalLM", LLAMA, TEXT),
    "starcoder2": ("Starcoder2ForCausalLM", LLAMA | {"residual_dropout": 0.0, "embedding_dropout": 0.0}, TEXT),
}
CONFIGS = {"ViTForImageClassification": "ViTConfig", "Gemma3ForCausalLM": "Gemma3TextConfig"}


def config_of(kind):
    return CONFIGS.get(kind) or next(
        kind.removesuffix(end) + "Config"
        for end in ("LMHeadModel", "ForMaskedLM", "ForCausalLM", "ForImageClassification", "ForConditionalGeneration")
        if kind.endswith(end)
    )


def model(name):
    kind, config, inputs = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, config_of(kind))(**config)
    return getattr(transformers, kind)(config).train(), inputs


def results(net, inputs):
    net.zero_grad()
    logits = net(**inputs).logits
    logits.float().square().mean().backward()
    grads = {name: it.grad for name, it in net.named_parameters() if it.grad is not None}
    return {"logits": logits.detach()} | grads


def relative_errors(ours, theirs):
    """Return each tensor's error relative to its norm. A gradient that is nothing but rounding (a key's bias, say) is
    compared with the largest norm."""
    assert ours.keys() == theirs.keys()
    floor = 1e-3 * max(it.norm() for it in theirs.values())
    return {name: ((ours[name] - it).norm() / it.norm().clamp(min=floor)).item() for name, it in theirs.items()}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_computes_the_same(name):
    net, inputs = model(name)
    classes = {it: type(it) for it in net.modules()}
    keys, theirs = list(net.state_dict()), results(net, inputs)
    report = fuse(net)
    assert report.fused, str(report)
    fused = [it for it in net.modules() if type(it) is not classes[it]]
    assert len(fused) == len({site.module for site in report.fused})
    for it in fused:
        assert isinstance(it, classes[it])
        assert type(it).__name__ == classes[it].__name__
    ours = results(net, inputs)
    assert max(relative_errors(ours, theirs).values()) < 1e-5
    assert list(net.state_dict()) == keys
    unfuse(net)
    assert {it: type(it) for it in net.modules()} == classes
    assert_close(results(net, inputs), theirs, rtol=0, atol=0)


@pytest.mark.parametrize("name", MODELS)
def test_copies_of_a_fused_model_are_fused(name):
    net, inputs = model(name)
    report = fuse(net)
    net.eval()
    with torch.no_grad():
        want = net(**inputs).logits
        for copied in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
            for mine, its in zip(net.modules(), copied.modules(), strict=True):
                assert type(mine) is type(its)
            assert_close(copied(**inputs).logits, want, rtol=0, atol=0)
            assert fuse(copied).fused == report.fused


@pytest.mark.parametrize("name", MODELS)
def test_what_is_fused_compiles_and_computes_the_same(name):
    """The rest of a model is transformers' own, and takes torch.compile ten times as long."""
    net, inputs = model(name)
    classes, want = {it: type(it) for it in net.modules()}, net(**inputs).logits
    fuse(net)
    torch.compiler.reset()
    for it in classes:
        if type(it) is not classes[it]:
            it.compile(fullgraph=True, backend="eager")
    assert_close(net(**inputs).logits, want, rtol=1e-5, atol=1e-5)


LEFT_ALONE = {
    "clip": ("CLIPTextModel", "CLIPTextConfig", BERT | {"hidden_act": "quick_gelu"}),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", LLAMA | {"num_local_experts": 2}),
    "qwen3 moe": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        LLAMA | {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16},
    ),
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_a_model_is_left_alone(name):
    kind, config, options = LEFT_ALONE[name]
    torch.manual_seed(0)
    net = getattr(transformers, kind)(getattr(transformers, config)(**options)).eval()
    classes = {it: type(it) for it in net.modules()}
    want = net(**TEXT)[0]
    report = fuse(net)
    assert report.fused == []
    says = (
        "is no activation that mpkernels knows"
        if name == "clip"
        else "stacks the weights of several layers, such as experts"
    )
    assert [site.reason for site in report.left if says not in site.reason] == []
    assert {it: type(it) for it in net.modules()} == classes
    assert_close(net(**TEXT)[0], want, rtol=0, atol=0)


CHECKPOINTED = ["gpt2", "opt", "whisper", "llama"]  # in OPT and Whisper, the layer itself is fused


@pytest.mark.parametrize("name", CHECKPOINTED)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_grads(name, use_reentrant):
    grads = []
    for is_fused in (False, True):
        net, inputs = model(name)
        if is_fused:
            fuse(net)
        net.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        grads.append(results(net, inputs))
    assert max(relative_errors(*reversed(grads)).values()) < 1e-5


@pytest.mark.parametrize(
    ("name", "note", "ops"),
    [
        ("gpt2", "mlp, gelu_tanh: torch's one op for a chain of small ones", ["mlp", "mlp"]),
        ("bert", "linear_act, gelu: torch is as fast", []),
    ],
)
def test_where_torch_computes_only_a_chain_of_small_ops_is_fused(name, note, ops):
    selector.pin("torch")
    net, inputs = model(name)
    theirs = results(net, inputs)
    report = fuse(net)
    assert {it.computed_by for it in report.fused} >= {note}
    for _ in range(2):
        with recorded_ops() as ran:
            ours = results(net, inputs)
        assert ran == ops
        assert max(relative_errors(ours, theirs).values()) < 1e-5
    sizes = report.saved_bytes(inputs)
    assert (sizes.fused < sizes.plain) == bool(ops)


def test_a_fused_model_generates_the_same():
    net, inputs = model("gpt2")
    texts = []
    for _ in range(2):
        texts.append(net.eval().generate(**inputs, max_new_tokens=4, do_sample=False))
        fuse(net)
    assert torch.equal(*texts)


@pytest.mark.parametrize("is_first", [True, False], ids=["fused first", "fused last"])
def test_fsdp2_around_layers_that_are_fused_themselves(is_first):
    """The layers' class wraps the forward of each subclass, also of FSDP's."""
    want = results(*model("opt"))
    with alone():
        net, inputs = model("opt")
        layers = net.model.decoder.layers
        kind = type(layers[0])
        fuse(net if is_first else layers[0].fc1)
        for module in (*layers, net):
            fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
        fuse(net)
        with recorded_ops() as ran:
            got = results(net, inputs)
        assert ran == ["mlp"] * 2
        got = {name: it.full_tensor() if name != "logits" else it for name, it in got.items()}
        assert max(relative_errors(got, want).values()) < 1e-5
        unfuse(net)
        assert isinstance(layers[0], kind)
        with recorded_ops() as ran:
            results(net, inputs)
        assert ran == []
