"""Models of transformers, with their usual width, cut to 4 layers and a small vocabulary, and inputs for them, 8 times
as many on a GPU."""

from collections.abc import Callable

import torch
import transformers
from torch import Tensor
from torch.nn import Module

TIMES = 8 if torch.cuda.is_available() else 1
VOCABULARY, TOKENS, IMAGES = 1024, (4 * TIMES, 512), 8 * TIMES
WIDTH = {"hidden_size": 768, "num_hidden_layers": 4, "num_attention_heads": 12, "intermediate_size": 3072}
Inputs = dict[str, Tensor]


def words() -> Inputs:
    ids = torch.randint(VOCABULARY, TOKENS, generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def images() -> Inputs:
    generator = torch.Generator().manual_seed(0)
    return {
        "pixel_values": torch.randn(IMAGES, 3, 224, 224, generator=generator),
        "labels": torch.zeros(IMAGES, dtype=torch.int64),
    }


def gpt2(activation: str = "gelu_new") -> Module:
    """Return GPT-2. Its own activation is eight ops in transformers; "gelu_pytorch_tanh" computes the same in one."""
    shape = {"n_embd": 768, "n_layer": 4, "n_head": 12, "n_positions": TOKENS[1], "vocab_size": VOCABULARY}
    no_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    options = {"activation_function": activation, "bos_token_id": 0, "eos_token_id": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, **no_dropout, **options))


def bert() -> Module:
    no_dropout = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    return transformers.BertForMaskedLM(transformers.BertConfig(**WIDTH, **no_dropout, vocab_size=VOCABULARY))


def llama() -> Module:
    shape = WIDTH | {"intermediate_size": 2048}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, vocab_size=VOCABULARY))


def vit() -> Module:
    return transformers.ViTForImageClassification(transformers.ViTConfig(**WIDTH))


MODELS: dict[str, Callable[[], tuple[Module, Inputs]]] = {
    "GPT-2": lambda: (gpt2(), words()),
    "GPT-2, gelu_pytorch_tanh": lambda: (gpt2("gelu_pytorch_tanh"), words()),
    "BERT": lambda: (bert(), words()),
    "Llama": lambda: (llama(), words()),
    "ViT": lambda: (vit(), images()),
}
