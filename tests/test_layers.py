"""Imports point down only: nn / optim / amp -> ops/<op> -> ops/_registry. Nobody imports a kernel."""

import ast
import subprocess
import sys
from pathlib import Path

import mpkernels

ROOT = Path(mpkernels.__file__).parent


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_imports(path):
    return [name.removeprefix("mpkernels.") for name in imports_of(path) if name.startswith("mpkernels")]


def test_ops_import_nothing_from_above():
    for path in (ROOT / "ops").glob("*.py"):
        for name in own_imports(path):
            assert name.startswith("ops."), f"{path.name} imports {name}"


def test_functional_is_below_the_modules_and_what_it_asks_below_both():
    assert own_imports(ROOT / "_modes.py") == own_imports(ROOT / "_cpu.py") == []
    assert own_imports(ROOT / "_cast_cache.py") == ["_modes.unseen"]
    assert own_imports(ROOT / "_choices.py") == ["_cpu"]
    assert own_imports(ROOT / "selector.py") == ["_choices", "_modes.is_tracing", "_modes.unseen"]
    assert set(own_imports(ROOT / "nn.py")) == {"functional"} | {
        f"ops._activations.{name}" for name in ("ActivationLike", "activation_name", "hooks_of")
    }
    below = ("_cast_cache", "_glance", "_modes", "selector", "ops.")
    assert all(name.startswith(below) for name in own_imports(ROOT / "_linear_act_choice.py"))
    assert all(name.startswith((*below, "_linear_act_choice")) for name in own_imports(ROOT / "functional.py"))


def test_the_registry_and_the_checks_import_no_op():
    for stem in ("_registry", "_checks", "_table", "_activations", "split", "int8"):
        assert own_imports(ROOT / "ops" / f"{stem}.py") == []


def test_nobody_imports_a_kernel():
    for path in ROOT.rglob("*.py"):
        assert not [name for name in own_imports(path) if "_triton" in name], path


def test_triton_is_imported_by_kernels_alone():
    for path in ROOT.rglob("*.py"):
        if not path.stem.endswith(("_triton", "_kernel")) and path.stem != "_table":
            body = ast.parse(path.read_text()).body
            at_import = [ast.unparse(node) for node in body if isinstance(node, ast.Import | ast.ImportFrom)]
            assert "triton" not in " ".join(at_import), path


def test_only_the_registry_touches_torch_library():
    for path in ROOT.rglob("*.py"):
        if path.stem != "_registry":
            assert not [name for name in imports_of(path) if name.startswith("torch.library")], path


def test_what_compiles_is_not_imported():
    """It takes as long as torch itself."""
    code = "import sys, mpkernels.amp, mpkernels.nn, mpkernels.optim; sys.exit('torch._dynamo' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_environment_variable_is_read():
    for path in [*ROOT.rglob("*.py"), *(ROOT.parent / "csrc").rglob("*.[ch]*")]:
        assert "environ" not in path.read_text(), path
        assert "getenv" not in path.read_text(), path


def test_torch_headers_are_seen_by_nobody_and_the_abi_by_glue_alone():
    csrc = ROOT.parent / "csrc"
    for path in csrc.rglob("*.[ch]*"):
        text = path.read_text()
        assert "#include <torch" not in text, path
        if "torch" not in path.stem and path.stem not in ("tensor", "arguments", "linear_act_python"):
            assert "torch.h" not in text, path
            assert "aoti_torch" not in text, path
