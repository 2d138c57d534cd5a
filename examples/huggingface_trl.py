"""TRL's SFTTrainer with bf16 weights, whose fp32 masters AdamW keeps.

    pip install '.[integrations]'
    python examples/huggingface_trl.py

TRL loads a model given by name in fp32, because torch's AdamW rounds small updates of bf16 weights away. This AdamW
keeps what they lack, so they may be bf16: pass a model as below, or ``model_init_kwargs={"dtype": "bfloat16"}``. Model
and tokenizer are made here, so that nothing is downloaded; with ``from_pretrained`` it is the same.
"""

import sysconfig
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from mpkernels.integrations.transformers import adamw


def tokenizer_of_bytes() -> PreTrainedTokenizerFast:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: place for place, letter in enumerate(["<end>", *letters])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")


def main() -> tuple[float, float]:
    """Return the first loss and the last one."""
    torch.manual_seed(0)
    lines = Path(sysconfig.get_paths()["stdlib"], "argparse.py").read_text().splitlines()
    rows = [{"text": "\n".join(lines[first : first + 4])} for first in range(0, 1280, 4)]
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=257, max_position_embeddings=128, **shape)).to(torch.bfloat16)

    with tempfile.TemporaryDirectory() as folder:
        options = {"max_length": 128, "per_device_train_batch_size": 16, "learning_rate": 3e-3, "max_steps": 20}
        quiet = {"logging_steps": 5, "save_strategy": "no", "report_to": [], "disable_tqdm": True}
        arguments = SFTConfig(folder, bf16=True, use_cpu=not torch.cuda.is_available(), **options, **quiet)
        trainer = SFTTrainer(
            model,
            arguments,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer_of_bytes(),
            optimizer_cls_and_kwargs=adamw(arguments),  # with the arguments' learning rate, betas and weight decay
        )
        trainer.train()
    state = trainer.optimizer.optimizer.state.values()  # Accelerate wraps the optimizer
    print(f"weights {model.dtype}; {len(state)} parameters have: {', '.join(next(iter(state)))}")
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses[0], losses[-1]


if __name__ == "__main__":
    main()
