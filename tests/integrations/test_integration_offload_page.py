"""The recipes of docs/offload.md for other libraries run as they stand."""

import pytest
import torch

from mpkernels.optim import AdamW
from tests import ROOT, libraries
from tests.docs.test_docs import ANY_BLOCK, BLOCK
from tests.networks import B16

libraries.need()
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from tests.matrix.offloading import on_a_cpu  # noqa: E402

PAGE = (ROOT / "docs" / "offload.md").read_text()
SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.mark.filterwarnings("ignore:'pin_memory' argument")  # where there is no GPU
def test_the_recipes_run(tmp_path):
    torch.manual_seed(0)
    [recipe] = set(ANY_BLOCK.findall(PAGE)) - set(BLOCK.findall(PAGE))
    for_trainer, _, for_torchao = recipe.rpartition("\n\n")
    model, row = LlamaForCausalLM(LlamaConfig(vocab_size=256, **SHAPE)).to(B16), torch.arange(16)
    names = {"model": model, "folder": str(tmp_path), "rows": [{"input_ids": row, "labels": row}] * 24, "AdamW": AdamW}
    exec(for_trainer, names)
    optimizer = names["optimizer"]
    assert optimizer.offload
    assert optimizer.skipped_steps == 0
    assert {int(state["step"]) for state in optimizer.state.values()} == {3}
    with on_a_cpu():
        exec(for_torchao, names)
        before = model.lm_head.weight.detach().clone()
        model(input_ids=row[None], labels=row[None]).loss.backward()
        names["optimizer"].step()
    assert type(names["optimizer"]).__name__ == "CPUOffloadOptimizer"
    assert not model.lm_head.weight.equal(before)
