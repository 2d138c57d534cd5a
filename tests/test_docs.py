"""Every block of Python in README and docs/ runs as it stands, after the imports of those above it.

What begins with ```py is for the eye: it needs other libraries.
"""

import re
from pathlib import Path

import pytest
import torch

from mpkernels import amp, optim, selector
from tests.networks import one_thread  # noqa: F401

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
BLOCKS = {
    f"{page.name}-{number}": (page, number)
    for page in PAGES
    for number, _ in enumerate(BLOCK.findall(page.read_text()))
}


def loss(output, targets):
    return (output.float() - targets).square().mean()


def of_a_reader():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU(), torch.nn.Linear(16, 1))
    batches = [(torch.randn(8, 16), torch.randn(8, 1)) for _ in range(3)]
    optimizer = optim.AdamW(model.parameters())
    loss(model(batches[0][0]), batches[0][1]).backward()
    return {
        "torch": torch,
        "model": model,
        "batches": batches,
        "loader": batches,
        "loss": loss,
        "inputs": batches[0][0],
        "first": batches[0][0],
        "second": batches[1][0],
        "targets": batches[0][1],
        "optimizer": optimizer,
        "scaler": amp.GradScaler(),
        "x": torch.randn(2, 768),
    }


@pytest.mark.parametrize("name", BLOCKS)
def test_block(name, tmp_path, monkeypatch):
    page, number = BLOCKS[name]
    *above, block = BLOCK.findall(page.read_text())[: number + 1]
    imports = "\n".join(line for each in above for line in each.splitlines() if line.startswith(("import ", "from ")))
    monkeypatch.chdir(tmp_path)
    # A 16-bit model takes inputs of its dtype; a reader's come from a loader that knows.
    torch.nn.Linear.forward, forward = _casting(torch.nn.Linear.forward), torch.nn.Linear.forward
    try:
        exec(compile(f"{imports}\n{block}", page.name, "exec"), of_a_reader())
    finally:
        torch.nn.Linear.forward = forward
        selector.make_deterministic()


def _casting(forward):
    return lambda self, x: forward(self, x if torch.is_autocast_enabled("cpu") else x.to(self.weight.dtype))
