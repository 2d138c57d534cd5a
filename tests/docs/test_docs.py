"""Every block of Python in README and docs/ runs as it stands, after the imports of the blocks above it. Its first line
says which names a reader has to provide.

Blocks that begin with ```py don't run: they need other libraries.
"""

import ast
import builtins
import dis
import importlib
import inspect
import os
import re
import runpy
import shlex
import subprocess
from types import CodeType, FunctionType

import pytest
import torch

import mpkernels
from mpkernels import amp, checkpoint, doctor, functional, nn, ops, optim, selector
from mpkernels.__main__ import main
from tests import ROOT
from tests.networks import one_thread  # noqa: F401

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
ANY_BLOCK = re.compile(r"^```(?:python|py)\n(.*?)^```", re.MULTILINE | re.DOTALL)
BLOCKS = {
    f"{page.name}-{number}": (page, number)
    for page in PAGES
    for number, _ in enumerate(BLOCK.findall(page.read_text()))
}


def loss(output, targets):
    return (output.float() - targets).square().mean()


def names_of_a_reader():
    """Return the names that a reader is assumed to have."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU(), torch.nn.Linear(16, 1))
    batches = [(torch.randn(8, 16), torch.randn(8, 1)) for _ in range(3)]
    optimizer = optim.AdamW(model.parameters())
    loss(model(batches[0][0]), batches[0][1]).backward()
    return {
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_files_that_prove_a_page_are_there(page):
    named = re.findall(r"(?:tests|examples|csrc|docs|benchmarks)/[\w/]+\.\w+", page.read_text())
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", PAGES[1:], ids=lambda page: page.name)
def test_a_page_begins_with_whom_it_is_for_and_an_example(page):
    title, whom, text = page.read_text().split("\n\n", 2)
    assert title.startswith("# ")
    assert whom.startswith("For ")
    assert "```python" in "".join(text.splitlines(keepends=True)[:12])


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_runs(name, tmp_path, monkeypatch):
    page, number = BLOCKS[name]
    block = BLOCK.findall(page.read_text())[number]
    monkeypatch.chdir(tmp_path)
    # A 16-bit model takes 16-bit inputs, as a reader's loader would make them.
    torch.nn.Linear.forward, forward = _casting(torch.nn.Linear.forward), torch.nn.Linear.forward
    try:
        exec(compile(block, page.name, "exec"), names_of_a_reader())
    finally:
        torch.nn.Linear.forward = forward
        selector.pin(None)
        selector.tuned.clear()
        selector.ask_again()


def needed(source):
    """Return the names that the source reads before it sets them, in their order."""
    names, known = {}, set(dir(builtins)) | {"__name__"}

    def read(code):
        for step in dis.get_instructions(code):
            if step.opname in ("STORE_NAME", "STORE_GLOBAL"):
                known.add(step.argval)
            elif step.opname in ("LOAD_NAME", "LOAD_GLOBAL") and step.argval not in known:
                names[step.argval] = None
            elif isinstance(step.argval, CodeType):
                read(step.argval)

    read(compile(source, "block", "exec"))
    return list(names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_block_says_what_it_needs(page):
    for number, block in enumerate(ANY_BLOCK.findall(page.read_text())):
        names = needed(block)
        line = f"# yours: {', '.join(names)}" if names else ""
        assert block.startswith(line), f"block {number} should begin with {line!r}"
        assert line or not block.startswith("# yours"), f"block {number} needs nothing"


def _casting(forward):
    return lambda self, x: forward(self, x if torch.is_autocast_enabled("cpu") else x.to(self.weight.dtype))


def public_objects():
    """Return the objects that the API page lists, with those of their methods and properties that are ours."""
    for module in (mpkernels, optim, amp, checkpoint, functional, nn, ops, selector, doctor):
        for name in module.__all__ if hasattr(module, "__all__") else _names_defined_in(module):
            it = getattr(module, name)
            if (getattr(it, "__module__", None) or "").startswith("mpkernels"):
                yield f"{module.__name__}.{name}", it
                members = vars(it).items() if isinstance(it, type) else ()
                yield from ((f"{name}.{key}", member) for key, member in members if not key.startswith("_"))


def _names_defined_in(module):
    names = (name for name, it in vars(module).items() if getattr(it, "__module__", "") == module.__name__)
    return [name for name in names if not name.startswith("_")]


def test_every_argument_of_a_public_name_has_a_text_of_its_own():
    """Sphinx would repeat the text of ``a, b: ...`` for each of them."""
    texts = {name: inspect.getdoc(it) or "" for name, it in public_objects()}
    assert len(texts) > 60
    assert [name for name, text in texts.items() if re.search(r"^    \w+(, \w+)+: ", text, re.MULTILINE)] == []
    assert [name for name, it in public_objects() if isinstance(it, type | FunctionType) and not texts[name]] == []


def test_the_api_page_has_every_name_as_the_sources_have_it():
    page = (ROOT / "docs" / "api.md").read_text()
    assert runpy.run_path(str(ROOT / "docs" / "api_page.py"))["page"]() == page, "python docs/api_page.py writes it"
    names = [name for name, it in public_objects() if name.startswith("mpkernels.")]
    assert [name for name in names if f"### {name.rpartition('.')[2]}\n" not in page] == []
    for line in ("`AdamW(params, lr=0.001, betas=(0.9, 0.999), eps=1e-08,", "* `grad_norm`: "):
        assert page.count(f"\n{line}") == 1


def commands():
    """Return the commands in README and docs, from blocks and from lines."""
    text = "\n".join(page.read_text() for page in PAGES)
    command = r"(?:python -m )?mpkernels ((?:bench|demo|doctor)\b.*?)"
    return sorted({*re.findall(rf"`{command}`", text), *re.findall(rf"^{command}(?: +#.*)?$", text, re.MULTILINE)})


@pytest.mark.parametrize("words", commands())
def test_a_command_is_taken_as_it_stands(words, monkeypatch):
    asked = []
    command = importlib.import_module(f"mpkernels.{words.split()[0]}.command")
    monkeypatch.setattr(command, "run", lambda arguments, refuse: asked.append(arguments) or 0)
    assert main(shlex.split(words)) == 0
    assert len(asked) == 1


def lines_of_make(target, **variables):
    """Return what make would run with these variables alone: this test itself may run under make."""
    command = ["make", "--no-print-directory", "-n", target]
    environment = {"PATH": os.environ["PATH"]} | variables
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    return [line.strip() for line in done.stdout.splitlines()]


def test_readme_and_install_spell_out_what_make_does():
    for page in (ROOT / "README.md", ROOT / "docs" / "install.md"):
        lines = page.read_text().splitlines()
        assert [line for line in lines if line.startswith("make ")] == ["make demo", "make test"], page
        spelled = [line for line in lines if line.startswith("python3 ")]
        for target, commands in zip(("demo", "test"), spelled, strict=True):
            made = " && ".join(lines_of_make(target, has_gpu="1"))
            assert made.replace("'torch==2.13.0'", "torch==2.13.0") == commands
            assert commands.startswith("python3 -m venv .venv && .venv/bin/python -m pip install torch==2.13.0 && ")
            assert f'"make {target}' in (ROOT / ".ci" / "run").read_text()


def test_make_fetches_the_cpus_torch_where_there_is_no_gpu():
    """Or pip's, where torch's own index can't be reached. PyPI's has CUDA."""
    at_torchs, at_pips = lines_of_make("environment", has_gpu="", TORCH="torch==2.12.0")[1].split(" || ")
    assert "--index-url https://download.pytorch.org/whl/cpu" in at_torchs
    assert at_torchs.endswith(" 'torch==2.12.0'")
    assert at_pips == ".venv/bin/python -m pip install 'torch==2.12.0'"


def test_make_keeps_the_environment_that_is_active(tmp_path):
    assert lines_of_make("demo", VIRTUAL_ENV=str(tmp_path)) == [
        f"{tmp_path}/bin/python -m pip install -v -e '.[demo]'",
        f"{tmp_path}/bin/python -m mpkernels demo",
    ]


def test_the_page_says_of_a_gpu_what_its_log_says():
    page = " ".join((ROOT / "docs" / "proof.md").read_text().split())
    log = (ROOT / "benchmarks" / "results" / "gpu" / "checks-h200-2026-11-26.txt").read_text()
    before, tests = log.split("== the tests that take CUDA")
    at_first, second, last = tests.split("\nTOTAL ")
    first, again = ({word: _sum(word, part) for word in OUTCOMES} for part in (at_first, last))
    began = "at first {passed:,} passed, {failed} failed, and {error} errors came before a test began"
    assert began.format(**first) in page
    assert (
        "ran again: {passed} passed, {failed} failed".format(**ast.literal_eval(second.partition("}")[0] + "}")) in page
    )
    assert f"{again['passed']:,} of these ran, and all passed" in page
    assert again["failed"] == again["error"] == 0
    [(agree, of)] = re.findall(r"(\d+) of (\d+) kernels agree with the reference \(", log)
    assert f"{agree} of {of} kernels agree with the reference" in page
    calls = re.findall(r"(\d+) calls and the steps ran on cuda", before)
    assert calls == 3 * calls[:1]
    assert f"no error in {calls[0]} calls of the ops and the steps" in page
    assert re.findall(r"(\w+) rc (\d+)", before) == [(tool, "0") for tool in ("memcheck", "racecheck", "synccheck")]


OUTCOMES = "passed", "failed", "error"


def _sum(word, log):
    return sum(int(count) for count in re.findall(rf"(\d+) {word}", log))


def test_a_step_on_a_gpu_is_two_launches():
    profile = (ROOT / "benchmarks" / "results" / "gpu" / "kernels-h200-2026-11-26.txt").read_text()
    [ours] = re.findall(r"^== gpt2 ours.*?(?=^==)", profile, re.MULTILINE | re.DOTALL)
    assert re.findall(r" ([\d.]+)x .*mpk::(step_kernel|grad_stats_kernel)", ours) == [
        ("1.0", "step_kernel"),
        ("1.0", "grad_stats_kernel"),
    ]


def test_the_overflow_report_in_docs_is_what_its_call_prints():
    page = (ROOT / "docs" / "overflow.md").read_text()
    [call] = re.findall(r"`print\((scaler\.overflow_report\(.*?\))\)`", page)
    [sample] = re.findall(r"^```\n(The newest skipped step.*?)^```", page, re.MULTILINE | re.DOTALL)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
    optimizer, scaler = optim.AdamW(model.parameters()), amp.GradScaler("cpu", init_scale=16384.0)
    scaler.scale(torch.ones(()))
    for param in model.parameters():
        param.grad = torch.full_like(param, 3.7 * 16384)
    model[2].weight.grad[0, 39] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    assert str(eval(call)) + "\n" == sample
