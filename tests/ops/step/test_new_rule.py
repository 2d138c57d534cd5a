"""CONTRIBUTING's recipe for a new rule, followed in a copy of the checkout with the files of new_rule/."""

import json
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from mpkernels._sources import fingerprint
from tests.building.builds import copy_checkout, python
from tests.proof.emulation import find_compiler

FILES = Path(__file__).with_name("new_rule")
IMPORT = "from mpkernels.ops.step.rules.rmsprop import rmsprop_  # noqa: F401\n"

LINES_OF_THE_TABLES = """\
from mpkernels.ops.step.rules.rmsprop import rmsprop_
from mpkernels.optim.rmsprop import RMSprop
HYPERS = {"lr": (1e-2, 1e-3), "alpha": (0.99, 0.9), "eps": (1e-8, 1e-6)}
RULE = rules_table.Line(rmsprop_, HYPERS, torch.optim.RMSprop, lambda hypers, _: hypers | {"foreach": False})
OPTIMIZER = optimizers.Line(RMSprop, {"alpha": 0.9}, torch.optim.RMSprop, ("square_avg",), 1e-3)
"""

IMPORTS = """
from tests import conftest  # first, for it changes Triton's interpreter
import mpkernels
import torch
from tests.ops.step import rules_table, test_rules_same_bits
from tests.optim import optimizers, test_optimizers
from tests.targets import TARGETS
"""

TESTS = """
SCALED_AND_CLIPPED = {"grad_scale": 3.0, "max_norm": 0.5}
assert mpkernels.backends("rmsprop_") == ["native", "triton", "reference"]
assert TARGETS["cpu-cuda"].why_missing() is None  # it is built now
for name in ("cpu-reference", "cpu-native", "cpu-triton", "cpu-cuda"):
    target = TARGETS[name]
    with target.active():
        test_rules_same_bits.test_every_combination_of_dtypes_gives_the_references_bits(target, RULE)
        test_rules_same_bits.test_unscaling_and_clipping_give_the_references_bits(target, RULE, SCALED_AND_CLIPPED)
        test_rules_same_bits.test_steps_in_fp64_are_plain_torchs(target, RULE, True)
        test_optimizers.test_it_steps_as_plain_torch_does(target, OPTIMIZER)
test_optimizers.test_16_bit_parameters_learn_what_fp32_ones_learn(OPTIMIZER, torch.bfloat16, "split", torch.int8)
print("all kernels agree")
"""


def keep_what_a_step_needs(csrc):
    """Leave out the C++ of other ops, which takes minutes to compile."""
    for source in (*csrc.rglob("*.cpp"), *csrc.rglob("*.cu")):
        if not source.name.startswith(("driver", "grad_stats", "overflow", "step")):
            source.unlink()


def build_for_the_cpu(tree):
    """Build as setup.py does, for one instruction set only."""
    sources = [*tree.glob("csrc/**/*_cpu.cpp"), *tree.glob("csrc/**/*_torch.cpp")]
    sources.append(Path(torch.__file__).parent / "lib" / "libtorch.so")
    flags = "-shared -fPIC -std=c++17 -O2 -ffp-contract=off -fno-math-errno -Wno-psabi -Wl,--no-as-needed"
    command = *find_compiler(), *flags.split(), "-DMPK_ISA=baseline", "-Icsrc", *map(str, sources)
    subprocess.run([*command, "-o", "mpkernels/_native.so"], cwd=tree, check=True)
    (tree / "mpkernels" / "_build_info.json").write_text(json.dumps({"sources": fingerprint(tree)}))


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform != "linux" or find_spec("triton") is None, reason="needs each kernel")
def test_a_new_rule_is_a_few_files_and_all_kernels_agree(tmp_path):
    files = [path for path in FILES.rglob("*") if path.is_file()]
    texts = IMPORT, LINES_OF_THE_TABLES, *(path.read_text() for path in files)
    assert sum(len(text.splitlines()) for text in texts) < 120
    tree = copy_checkout(tmp_path / "checkout")
    keep_what_a_step_needs(tree / "csrc")
    shutil.copytree(FILES, tree, dirs_exist_ok=True)
    with (tree / "mpkernels" / "ops" / "__init__.py").open("a") as ops:
        ops.write(IMPORT)
    build_for_the_cpu(tree)
    said = python("-c", IMPORTS + LINES_OF_THE_TABLES + TESTS, cwd=tree, PYTHONPATH=str(tree), TRITON_INTERPRET="1")
    assert said.endswith("all kernels agree\n")
