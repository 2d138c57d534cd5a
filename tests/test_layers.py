"""Imports point down, room by room, and no two modules import each other. Nobody imports a kernel."""

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import mpkernels

ROOT = Path(mpkernels.__file__).parent
ROOMS = (  # from the top down
    *("__main__", "demo", "doctor", "bench", "integrations"),
    "__init__",
    *("profiling", "metrics", "memory", "checkpoint", "amp", "optim", "overflow"),
    *("nn", "functional", "linear", "selector", "distributed"),
    *("ops", "_torch_private", "_shared", "_sources"),
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
    """Return the modules of ours that a file imports, by module even if only a name is imported."""
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


LOOK_UP = re.compile(r"(?:import_module|__import__|sys\.modules\.get|sys\.modules\.pop)\([^)]*mpkernels[^)]*")
SUBSCRIPT = re.compile(r"sys\.modules\[[^]]*mpkernels[^]]*")


def hidden_imports(source):
    """Yield all imports of our modules except those at the top of a file."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom) and node not in tree.body and "mpkernels" in ast.unparse(node):
            yield ast.unparse(node)
    yield from LOOK_UP.findall(source) + SUBSCRIPT.findall(source)


def test_no_import_hides_in_a_function_or_from_types():
    for module, path in MODULES.items():
        # mpkernels.doctor uses all of the package, and is there for those who ask for it without an import.
        allowed = ['import_module("mpkernels.doctor"'] if module == "mpkernels" else []
        assert list(hidden_imports(path.read_text())) == allowed, module
        assert "TYPE_CHECKING" not in path.read_text(), module


@pytest.mark.parametrize(
    "line",
    [
        "import mpkernels.amp",
        "from mpkernels import amp",
        "amp = importlib.import_module('mpkernels.amp')",
        "amp = import_module('.amp', 'mpkernels')",
        "amp = sys.modules['mpkernels.amp']",
        "amp = sys.modules.get('mpkernels.amp')",
    ],
)
def test_an_import_that_hides_is_found(line):
    assert len(list(hidden_imports(f"def function():\n    {line}"))) == 1


def test_the_registry_and_the_checks_import_no_op():
    below = {"mpkernels._sources", "mpkernels.ops._extension", "mpkernels.ops._dispatcher", "mpkernels.ops._devices"}
    below |= {module for module in MODULES if room_of(module) in ("_torch_private", "_shared")}
    modules = (
        "_dispatcher",
        "_devices",
        "_registry",
        "_checks",
        "_tensor_table",
        "linear.activations",
        "step.split",
        "step.int8",
    )
    for module in modules:
        assert GRAPH[f"mpkernels.ops.{module}"] <= below, module


def test_nobody_imports_a_kernel():
    """Only kernels may import a kernel, to build on its functions."""
    for module, imported in GRAPH.items():
        if module.endswith("_triton"):
            continue
        assert not [name for name in imported if "_triton" in name], module


def test_triton_is_imported_by_kernels_alone():
    for path in ROOT.rglob("*.py"):
        if not path.stem.endswith(("_triton", "_kernel")) and path.stem != "_tensor_table":
            body = ast.parse(path.read_text()).body
            at_import = [ast.unparse(node) for node in body if isinstance(node, ast.Import | ast.ImportFrom)]
            assert "triton" not in " ".join(at_import), path


def test_only_one_module_touches_torch_library():
    for path in ROOT.rglob("*.py"):
        if path.stem != "_dispatcher":
            assert not [name for name in imports_of(path) if name.startswith("torch.library")], path


def test_the_compiler_is_not_imported():
    """Importing torch's compiler takes as long as importing torch."""
    code = "import sys, mpkernels.amp, mpkernels.nn, mpkernels.optim; sys.exit('torch._dynamo' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_environment_variable_is_read():
    """Except oneDNN's own variable, which decides what torch multiplies with."""
    for path in [*ROOT.rglob("*.py"), *(ROOT.parent / "csrc").rglob("*.[ch]*")]:
        text = path.read_text().replace('getenv("ONEDNN_MAX_CPU_ISA")', "")
        assert "environ" not in text, path
        assert "getenv" not in text, path


def test_no_file_includes_torch_headers_and_only_glue_uses_the_abi():
    csrc = ROOT.parent / "csrc"
    for path in csrc.rglob("*.[ch]*"):
        text = path.read_text()
        assert "#include <torch" not in text, path
        if "torch" not in path.stem and path.stem not in ("tensor", "arguments"):
            assert "torch.h" not in text, path
            assert "aoti_torch" not in text, path


FENCE = ast.get_docstring(ast.parse(MODULES["mpkernels._torch_private"].read_text()))
KNOWN = {*re.findall("``(_\\w+)``", FENCE), "_asdict", "_fields", "_replace", "_getframe"}  # documented names of Python
TORCHS = {"_base", "_cdata", "_values", "_version"}  # count as torch's, though we have such names, too


def names_defined_in(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and root_of(node.value) == "self":
            yield node.attr


def root_of(node):
    while isinstance(node, ast.Attribute):
        node = node.value
    return getattr(node, "id", None)


def private_names(tree, own):
    """Yield the private names that the code reads from objects that aren't ours, or imports. A whole string counts,
    because getattr may take it; a part of an f-string doesn't."""
    parts = {id(it) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for it in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            names = [(node.attr, root_of(node) in ("torch", "nn"))]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            names = [(node.value, False)]
        elif isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "torch":
            names = [(name, True) for it in node.names for name in (*node.module.split("."), it.name)]
        else:
            continue
        for name, is_torchs in names:
            is_ours = name in own and name not in TORCHS and not is_torchs
            if re.fullmatch(r"_[A-Za-z]\w*", name) and not is_ours and name not in KNOWN:
                yield name


def test_private_names_of_torch_are_behind_one_fence():
    own = {name for path in MODULES.values() for name in names_defined_in(ast.parse(path.read_text()))}
    for module, path in MODULES.items():
        if room_of(module) not in ("_torch_private", "bench"):
            assert list(private_names(ast.parse(path.read_text()), own)) == [], module


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("torch._foreach_mul_(grads, 2)  # too", "_foreach_mul_"),
        ("kept = x._version", "_version"),
        ("getattr(x, '_base')", "_base"),
        ("from torch._C import Graph", "_C"),
        ("from torch.library import _impls as impls", "_impls"),
        ("torch.ops.aten._own", "_own"),
        ("x.grad._indices()", "_indices"),
    ],
)
def test_a_private_name_is_found(line, name):
    source = f'''"""A module."""  # with a comment\n_own = 1\n{line}'''
    assert list(private_names(ast.parse(source), {"_own", "_version"})) == [name]
