"""Hugging Face's Trainer, against the real library: a tiny model from a config learns Python's own sources as bytes."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from mpkernels.amp import to_full, to_mixed
from mpkernels.nn import LinearAct
from mpkernels.optim import AdamW
from tests.networks import B16

pytest.importorskip("transformers", reason="needs the extra integrations")
pytest.importorskip("accelerate", reason="needs the extra integrations")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
    from transformers.activations import ACT2CLS, ACT2FN

    from mpkernels.integrations.transformers import LogMixedPrecision, TellSkips, adamw

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own
LR, STEPS = 3e-3, 12


def model():
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=64, tie_word_embeddings=True, **shape))


def text():
    rows = torch.tensor(list(Path(json.decoder.__file__).read_bytes()[: 96 * 33])).view(96, 33)
    return [{"input_ids": row, "labels": row} for row in rows]


def arguments(path, **options):
    defaults = {
        "per_device_train_batch_size": 8,
        "max_steps": STEPS,
        "logging_steps": 1,
        "learning_rate": LR,
        "lr_scheduler_type": "constant",
        "report_to": [],
        "use_cpu": True,
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": 1,
    }
    return TrainingArguments(str(path), **defaults | options)


def losses(trainer):
    return torch.tensor([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])


def trained(path, net, options, **how):
    trainer = Trainer(net, arguments(path, **options), train_dataset=text(), **how)
    trainer.train()
    return trainer


WAYS = {
    "optimizers": lambda net: {"optimizers": (AdamW(net.parameters(), lr=LR), None)},
    "optimizer class": lambda net: {"optimizer_cls_and_kwargs": (AdamW, {"lr": LR})},
    "torch's": lambda net: {"optimizers": (torch.optim.AdamW(net.parameters(), lr=LR, weight_decay=0.01), None)},
}


@pytest.mark.parametrize("precision", [{}, {"bf16": True}, {"fp16": True}], ids=str)
@pytest.mark.parametrize("way", ["optimizers", "optimizer class"])
def test_it_learns_what_torchs_learns(tmp_path, way, precision):
    """fp16 is fp32 on a CPU: Accelerate says nothing, and makes no scaler there."""
    options = precision | {"gradient_accumulation_steps": 2, "weight_decay": 0.01}
    trainers = {}
    for name in (way, "torch's"):
        net = model()
        trainers[name] = trained(tmp_path, net, options, **WAYS[name](net))
    ours, theirs = map(losses, trainers.values())
    optimizer = trainers[way].optimizer
    assert isinstance(getattr(optimizer, "optimizer", optimizer), AdamW)
    assert ours[-1] < ours[0] - 0.5
    # The class decays no biases and norms, as Trainer groups them; an update of lr * 0.01 apart for those weights.
    assert_close(ours, theirs, rtol=0, atol=0.02)


def test_a_mixed_model_is_trained_saved_and_resumed(tmp_path):
    """Twelve steps, and twelve with a checkpoint after six, are the same down to the masters."""
    masters = []
    for resume in (False, True):
        net = to_mixed(model())
        assert net.lm_head.weight is net.model.embed_tokens.weight
        options = {"bf16": True, "save_strategy": "steps", "save_steps": STEPS // 2, "data_seed": 3}
        trainer = Trainer(
            net,
            arguments(tmp_path, **options),
            train_dataset=text(),
            optimizer_cls_and_kwargs=(AdamW, {"lr": LR}),
        )
        trainer.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{STEPS // 2}") if resume else None)
        assert net.model.layers[0].mlp.up_proj.weight.dtype == B16
        assert net.model.norm.weight.dtype == torch.float32
        optimizer = trainer.optimizer
        to_full(net, getattr(optimizer, "optimizer", optimizer))
        masters.append(net.state_dict())
    assert_close(*masters, rtol=0, atol=0)
    assert type(net) is LlamaForCausalLM
    net.generate(torch.tensor([[100]]), max_new_tokens=2, do_sample=False)


def test_adamw_takes_the_options_of_the_arguments_and_trainers_groups(tmp_path):
    """The options are those with which Trainer makes its own AdamW for ``optim="adamw_torch"``."""
    options = {"weight_decay": 0.02, "adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-6}
    args = arguments(tmp_path, optim="adamw_torch", **options)
    theirs = Trainer(model(), args).create_optimizer()
    ours = Trainer(model(), args, optimizer_cls_and_kwargs=adamw(args, state_dtype=B16)).create_optimizer()
    assert (type(ours), type(theirs)) == (AdamW, torch.optim.AdamW)
    for group, torchs in zip(ours.param_groups, theirs.param_groups, strict=True):
        same = "lr", "betas", "eps", "weight_decay"
        assert [group[name] for name in same] == [torchs[name] for name in same]
        assert [it.shape for it in group["params"]] == [it.shape for it in torchs["params"]]
        assert group["state_dtype"] == B16
    assert {group["weight_decay"] for group in ours.param_groups} == {0.02, 0.0}


def followed(args, **options):
    how = {"optimizer_cls_and_kwargs": adamw(args, **options), "callbacks": [TellSkips()]}
    trainer = Trainer(model(), args, train_dataset=text(), **how)
    trainer.add_callback(LogMixedPrecision(trainer))
    return trainer


def test_the_optimizers_metrics_are_in_trainers_log(tmp_path):
    """The scaler here stands for the scaler that Accelerate makes on a GPU."""
    args = arguments(tmp_path, lr_scheduler_type="linear", logging_steps=2, max_grad_norm=0)
    trainer = followed(args, max_norm=1.0)
    trainer.accelerator.scaler = scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for _ in range(2):  # the second training has another optimizer, and follows that alone
        trainer.train()
    entries = trainer.state.log_history
    ours = [entry for entry in entries if "mpkernels/loss_scale" in entry]
    assert [entry["step"] for entry in ours] == [entry["step"] for entry in entries if "loss" in entry]
    names = {f"mpkernels/{name}" for name in ("grad_norm", "skipped_steps", "loss_scale")}
    assert ours[0].keys() == names | {"epoch", "step"}
    assert len(trainer.optimizer.optimizer._optimizer_step_post_hooks) == 0
    assert ours[-1]["mpkernels/loss_scale"] == scaler.get_scale()


def test_a_skip_is_counted_and_the_schedule_waits(tmp_path):
    args = arguments(tmp_path, lr_scheduler_type="linear", max_grad_norm=0)
    trainer = followed(args)
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-110)
    trainer.train()
    name = "mpkernels/skipped_steps"
    skipped = [entry[name] for entry in trainer.state.log_history if name in entry]
    assert skipped == [1.0] * STEPS
    assert trainer.lr_scheduler.last_epoch == STEPS - 1


def test_bad_arguments_are_named(tmp_path):
    args = arguments(tmp_path)
    with pytest.raises(TypeError, match=r"^adamw: args must be transformers.TrainingArguments, got float$"):
        adamw(3e-4)
    with pytest.raises(TypeError, match=r"^adamw: lr must be given by TrainingArguments.learning_rate, got lr= here$"):
        adamw(args, lr=3e-4)
    with pytest.raises(TypeError, match=r"^LogMixedPrecision: trainer must be a transformers.Trainer, got LlamaFor"):
        LogMixedPrecision(model())
    trainer = Trainer(model(), args, train_dataset=text())
    trainer.add_callback(LogMixedPrecision(trainer))
    with pytest.raises(TypeError, match=r"^Metrics: optimizer must be one of mpkernels.optim, got torch.optim"):
        trainer.train()


ACTIVATIONS = {
    "linear": "none",
    "relu": "relu",
    "relu2": "relu2",
    **dict.fromkeys(("gelu", "gelu_python"), "gelu"),
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_python_tanh", "gelu_accurate"), "gelu_tanh"),
    **dict.fromkeys(("silu", "swish"), "silu"),
    "sigmoid": "sigmoid",
    "tanh": "tanh",
}


@pytest.mark.parametrize("name", ACT2CLS)
def test_activations_are_recognised_or_refused(name):
    """Each activation of transformers is recognised by what it computes, or refused."""
    module = ACT2FN[name]
    if name not in ACTIVATIONS:
        with pytest.raises(ValueError, match=r"^LinearAct: activation must be one of none, "):
            LinearAct(8, 16, activation=module)
        return
    layer, x = LinearAct(8, 16, activation=module), 4 * torch.randn(64, 8)
    assert layer.activation == ACTIVATIONS[name]
    assert_close(layer(x), module(torch.nn.functional.linear(x, layer.weight, layer.bias)))
