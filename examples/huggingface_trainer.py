"""Hugging Face's Trainer with 16-bit weights, and a model in fp32 at the end.

    pip install '.[integrations]'
    python examples/huggingface_trainer.py

``to_mixed`` halves the memory of weights and grads, AdamW keeps what the rounding takes away, ``to_full`` puts it back.
Learning rate, betas and weight decay come from TrainingArguments. TellSkips matters only for fp16=True on a GPU.
The model is made from a config and learns bytes of Python's own sources, so that nothing is downloaded; with
``from_pretrained`` it is the same.
"""

import sysconfig
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from mpkernels.amp import to_full, to_mixed
from mpkernels.integrations.transformers import LogMixedPrecision, TellSkips, adamw

CONTEXT, ROWS = 64, 320


def text():
    source = Path(sysconfig.get_paths()["stdlib"], "argparse.py").read_bytes()
    rows = torch.tensor(list(source[: ROWS * CONTEXT])).view(ROWS, CONTEXT)
    return [{"input_ids": row, "labels": row} for row in rows]


def main() -> tuple[float, float]:
    """Return the first loss and the last one."""
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = to_mixed(LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=CONTEXT, **shape)))
    print({str(dtype): sum(p.dtype == dtype for p in model.parameters()) for dtype in (torch.bfloat16, torch.float32)})

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=20,
            per_device_train_batch_size=16,
            logging_steps=5,
            learning_rate=3e-3,
            max_grad_norm=1.0,
            bf16=True,  # the loss, too, is computed under autocast
            use_cpu=not torch.cuda.is_available(),
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = Trainer(
            model,
            arguments,
            train_dataset=text(),
            optimizer_cls_and_kwargs=adamw(arguments),
            callbacks=[TellSkips()],
        )
        trainer.add_callback(LogMixedPrecision(trainer))
        trainer.train()
        to_full(model, trainer.optimizer.optimizer)  # inside Accelerate's wrapper
        model.save_pretrained(folder)
        print({str(param.dtype) for param in LlamaForCausalLM.from_pretrained(folder).parameters()})
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses[0], losses[-1]


if __name__ == "__main__":
    main()
