"""Whole models of transformers, fused by ``mpkernels.nn.fuse``, beside themselves: time and memory of a forward and
backward.

``python -m benchmarks.models NAME`` measures, and writes results/models/NAME.json for the book. The models have their
usual width, and are cut to 4 layers and a small vocabulary.
"""

import json
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn import Module
from torch.profiler import profile

from mpkernels.bench import machine
from mpkernels.nn import fuse

FOLDER = Path(__file__).parent / "results" / "models"
ROUNDS = 7
VOCABULARY, TOKENS = 1024, (4, 512)
WIDTH = {"hidden_size": 768, "num_hidden_layers": 4, "num_attention_heads": 12, "intermediate_size": 3072}
DTYPES = {"bf16 autocast": True, "fp32": False}
Inputs = dict[str, Tensor]


def words() -> Inputs:
    ids = torch.randint(VOCABULARY, TOKENS, generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def images() -> Inputs:
    generator = torch.Generator().manual_seed(0)
    return {
        "pixel_values": torch.randn(8, 3, 224, 224, generator=generator),
        "labels": torch.zeros(8, dtype=torch.int64),
    }


def gpt2() -> Module:
    shape = {"n_embd": 768, "n_layer": 4, "n_head": 12, "n_positions": TOKENS[1], "vocab_size": VOCABULARY}
    no_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, **no_dropout, bos_token_id=0, eos_token_id=0))


def bert() -> Module:
    no_dropout = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    return transformers.BertForMaskedLM(transformers.BertConfig(**WIDTH, **no_dropout, vocab_size=VOCABULARY))


def llama() -> Module:
    shape = WIDTH | {"intermediate_size": 2048}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, vocab_size=VOCABULARY))


def vit() -> Module:
    return transformers.ViTForImageClassification(transformers.ViTConfig(**WIDTH))


MODELS: dict[str, tuple[Callable[[], Module], Callable[[], Inputs]]] = {
    "GPT-2": (gpt2, words),
    "BERT": (bert, words),
    "Llama": (llama, words),
    "ViT": (vit, images),
}


def measure(name: str, is_mixed: bool) -> dict[str, Any]:
    """Return seconds of rounds in turns, and what a step needs at its peak beside the weights."""
    make, inputs = MODELS[name]
    torch.manual_seed(0)
    plain = make().train()
    sides = {"ours": deepcopy(plain), "theirs": plain}
    report = fuse(sides["ours"])
    batch = inputs()

    def step(model: Module) -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=is_mixed):
            loss = model(**batch).loss
        loss.backward()
        model.zero_grad()

    for model in sides.values():
        step(model)  # the selector times its ways
    peaks = {side: peak(lambda model=model: step(model)) for side, model in sides.items()}
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(ROUNDS):
        for side, model in sides.items():
            start = perf_counter()
            step(model)
            seconds[side].append(perf_counter() - start)
    sites = sorted({site.computed_by for site in report.fused})
    return {"model": name, "sites": sites, "seconds": seconds, "peak": peaks}


def peak(run: Callable[[], None]) -> int:
    """Return the most bytes that were allocated at a time, as torch's profiler notes them."""
    with profile(profile_memory=True) as noted:
        run()
    now = most = 0
    events = noted.profiler.kineto_results.events()
    for event in sorted((it for it in events if it.name() == "[memory]"), key=lambda it: it.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def main(name: str) -> None:
    rows = [{"dtype": dtype, **measure(model, it)} for model in MODELS for dtype, it in DTYPES.items()]
    FOLDER.mkdir(exist_ok=True)
    found = {"machine": machine.describe(), "transformers": transformers.__version__, "rows": rows}
    (FOLDER / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
