"""Imports point down, room by room, and no two modules import each other. Nobody imports a kernel."""

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import mpkernels

ROOT = Path(mpkernels.__file__).parent
ROOMS = (  # from the top down
    *("__main__", "demo", "doctor", "bench", "integrations"),
    *("__init__", "_old_names"),
    *("profiling", "memory", "checkpoint", "amp", "optim", "distributed", "overflow", "parameters", "parts"),
    *("nn", "functional", "linear", "selector"),
    *("ops", "_torch_private", "_extension", "_sources"),
)


def module_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("mpkernels", *(parts[:-1] if parts[-1] == "__init__" else parts)))


MODULES = {module_of(path): path for path in ROOT.rglob("*.py")}


def room_of(module):
    return module.split(".")[1] if "." in module else "__init__"


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_imports(path):
    """Of modules, whichever of their names is imported."""
    for name in imports_of(path):
        if name.split(".")[0] == "mpkernels":
            yield name if name in MODULES else name.rpartition(".")[0]


GRAPH = {module: {it for it in own_imports(path) if it != module} for module, path in MODULES.items()}


def test_every_module_has_a_room():
    assert {room_of(module) for module in MODULES} == set(ROOMS)


def test_imports_point_down():
    up = [
        (module, imported)
        for module, all_imported in GRAPH.items()
        for imported in all_imported
        if ROOMS.index(room_of(imported)) < ROOMS.index(room_of(module))
    ]
    assert up == []


def test_no_two_modules_import_each_other():
    tuple(TopologicalSorter(GRAPH).static_order())  # raises CycleError


def test_no_import_hides_in_a_function_or_from_types():
    for module, path in MODULES.items():
        tree = ast.parse(path.read_text())
        hidden = {id(node) for node in ast.walk(tree)} - {id(node) for node in tree.body}
        for node in ast.walk(tree):
            if id(node) in hidden and isinstance(node, ast.ImportFrom | ast.Import):
                assert "mpkernels" not in ast.unparse(node), f"{module}: {ast.unparse(node)}"
        assert "TYPE_CHECKING" not in path.read_text(), module


def test_the_registry_and_the_checks_import_no_op():
    for module in ("_registry", "_checks", "_table", "linear.activations", "adamw.split", "adamw.int8"):
        assert GRAPH[f"mpkernels.ops.{module}"] <= {"mpkernels._torch_private"}, module


def test_nobody_imports_a_kernel():
    for module, imported in GRAPH.items():
        assert not [name for name in imported if "_triton" in name], module


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
        if "torch" not in path.stem and path.stem not in ("tensor", "arguments"):
            assert "torch.h" not in text, path
            assert "aoti_torch" not in text, path


def test_private_names_of_torch_are_behind_one_fence():
    private = re.compile(r"\btorch(?:\.\w+)*\._[a-z]\w*|from torch[\w.]* import [^#\n]*\b_\w+|from torch[\w.]*\._")
    for path in ROOT.rglob("*.py"):
        if path.stem != "_torch_private" and path.relative_to(ROOT).parts[0] != "bench":
            code = re.sub(r"\"\"\".*?\"\"\"|#.*", "", path.read_text(), flags=re.DOTALL)
            assert private.findall(code) == [], path
