"""Writes docs/api.md from the sources, for those who read it on GitHub: ``python docs/api_page.py``.

It parses them, so that it needs none of the libraries that mpkernels.integrations imports."""

import ast
import importlib
import re
import sys
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "api.md"
MARK = "<!-- from here on written by python docs/api_page.py -->\n"

ROOMS = (
    *("mpkernels", "mpkernels.optim", "mpkernels.amp", "mpkernels.nn", "mpkernels.nn.parallel"),
    *("mpkernels.functional", "mpkernels.selector", "mpkernels.checkpoint", "mpkernels.doctor", "mpkernels.ops"),
)
OF_ALL_OPTIMIZERS = {"Engine": "engine", "SkippingOptimizer": "skipping_optimizer"}
REPORTS = ROOT / "mpkernels" / "nn" / "fusing" / "report.py"
LIBRARIES = "accelerate", "fabric", "lightning", "transformers"
BETWEEN_OURSELVES = {  # what optimizers and scalers of ours ask each other
    *("OurScaler", "handed_over", "is_guarded", "refuse_to_step_alone", "settle_before_hooks", "step_alone"),
    *("step_scaled", "has_zero_grads"),
}

Definition = ast.FunctionDef | ast.ClassDef


def page() -> str:
    return "\n".join([PAGE.read_text().partition(MARK)[0] + MARK, *lines()])


def lines() -> Iterator[str]:
    for room in ROOMS:
        yield f"## {room}\n"
        module = importlib.import_module(room)
        for name in sorted(getattr(module, "__all__", None) or names_in(module), key=str.casefold):
            yield from entry(name, getattr(module, name))
        if room == "mpkernels.optim":
            yield "### What all optimizers have\n"
            homes = ((name, ROOT / "mpkernels" / "optim" / f"{file}.py") for name, file in OF_ALL_OPTIMIZERS.items())
            members = [member for name, path in homes for member in members_of(definitions(path)[name])]
            yield from (*dict.fromkeys(members), "")
        if room == "mpkernels.nn":
            for name in ("FuseReport", "FusedSite", "LeftSite", "SavedBytes"):
                yield from described(name, definitions(REPORTS)[name])
    for library in LIBRARIES:
        yield f"## mpkernels.integrations.{library}\n"
        for name, it in definitions(ROOT / "mpkernels" / "integrations" / f"{library}.py").items():
            if is_public(name):
                yield from described(name, it)


def names_in(module: ModuleType) -> list[str]:
    return [name for name, it in vars(module).items() if getattr(it, "__module__", "") == module.__name__]


def is_public(name: str) -> bool:
    return not name.startswith("_") and name not in BETWEEN_OURSELVES


def entry(name: str, it: Any) -> Iterator[str]:
    kind = it if hasattr(it, "__name__") else type(it)
    home = sys.modules[getattr(kind, "__module__", kind.__name__)]
    if home.__name__.startswith("mpkernels") and not isinstance(it, ModuleType):
        found = definitions(Path(str(home.__file__)))[kind.__name__]
        yield from described(name, found if kind is it else method(found, "__call__") or found)


def definitions(path: Path) -> dict[str, Definition]:
    """Return what a file defines at its top, by name. Attributes get the text of a comment that begins with ``#:``."""
    text = path.read_text()
    found = [it for it in ast.parse(text).body if isinstance(it, Definition)]
    for attribute in ast.walk(ast.Module([*found], [])):
        if isinstance(attribute, ast.AnnAssign):
            *before, line = text.splitlines()[: attribute.lineno]
            above = [*takewhile(lambda line: line.strip().startswith("#:"), reversed(before))][::-1]
            attribute.text = line.partition("#: ")[2] or " ".join(it.strip(" #:") for it in above)
    return {it.name: it for it in found}


def described(name: str, it: Definition) -> Iterator[str]:
    yield f"### {name}\n\n`{name}{signature(it)}`"
    yield f"\n{sentence(ast.get_docstring(it))}\n" if ast.get_docstring(it) else ""
    if isinstance(it, ast.ClassDef) and (members := list(members_of(it))):
        yield from (*members, "")


def members_of(it: ast.ClassDef) -> Iterator[str]:
    """Yield a line for each public method, property or attribute that has a text."""
    for member in it.body:
        if isinstance(member, ast.AnnAssign) and member.text:
            yield f"* `{ast.unparse(member.target)}`: {sentence(member.text)}"
        elif isinstance(member, ast.FunctionDef) and is_public(member.name) and ast.get_docstring(member):
            is_property = "property" in map(ast.unparse, member.decorator_list)
            yield f"* `{member.name}{'' if is_property else signature(member)}`: {sentence(ast.get_docstring(member))}"


def method(it: Definition, name: str) -> ast.FunctionDef | None:
    return next((each for each in it.body if isinstance(each, ast.FunctionDef) and each.name == name), None)


def signature(it: Definition) -> str:
    """Return the arguments with their defaults, without types."""
    if isinstance(it, ast.ClassDef):
        fields = [ast.unparse(each.target) for each in it.body if isinstance(each, ast.AnnAssign)]
        if made := method(it, "__init__"):
            return signature(made)
        is_record = it.decorator_list or "NamedTuple" in map(ast.unparse, it.bases)
        return f"({', '.join(filter(is_public, fields))})" if is_record else ""
    for argument in ast.walk(it.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    return f"({re.sub(r'^(self|cls)(, |$)', '', ast.unparse(it.args))})"


def sentence(text: str | None) -> str:
    """Return the first sentence of a text. One that ends before an example or a list ends here."""
    first = " ".join(str(text).partition("\n\n")[0].replace("``", "`").split())
    return re.sub(r":$", ".", re.split(r"(?<=\.)\s", first)[0])


if __name__ == "__main__":
    PAGE.write_text(page())
