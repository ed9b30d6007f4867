"""How the modules stand to each other."""

import ast
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {"ppsd_rt": [], "models": ["models"], "triton_kernels": ["triton_kernels"]}  # as they are installed


def imports(path, package, modules):
    """What it imports of this project, inside functions and for types only too."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            home = package[: len(package) - node.level + 1] + (node.module.split(".") if node.module else [])
            for alias in node.names:
                name = ".".join([*home, alias.name])
                yield name if name in modules else ".".join(home)


@cache
def graph():
    """module -> those that it imports; without the package itself, which imports on first use."""
    modules = {}
    for folder, prefix in FOLDERS.items():
        for path in (ROOT / folder).rglob("*.py"):
            parts = [*prefix, *path.relative_to(ROOT / folder).with_suffix("").parts]
            package = parts[:-1]
            modules[".".join(package if parts[-1] == "__init__" else parts)] = path, package
    return {
        name: {found for found in imports(path, package, modules) if found in modules and found not in ("", name)}
        for name, (path, package) in modules.items()
        if name
    }


def test_no_module_imports_itself_by_way_of_others():
    try:
        TopologicalSorter(graph()).prepare()
    except CycleError as error:
        pytest.fail("import circle: " + " <- ".join(error.args[1]))


def test_the_models_know_nothing_of_what_runs_them():
    found = {name for module, names in graph().items() if module.startswith("models.") for name in names}
    assert {name.split(".")[0] for name in found} <= {"models", "errors", "extras", "printable", "arguments", "files"}


def test_the_product_imports_nothing_of_the_bench():
    """`ppsd_rt/cli/commands.py` names its commands; nothing else knows of it."""
    found = {
        module: [name for name in names if name.split(".")[0] == "bench"]
        for module, names in graph().items()
        if module.split(".")[0] != "bench" and module != "cli.commands"
    }
    assert not {module: names for module, names in found.items() if names}
    product = [path for path in (ROOT / "ppsd_rt").rglob("*.py") if "bench" not in path.relative_to(ROOT).parts]
    assert [path.name for path in product if '"bench.' in path.read_text(encoding="utf-8")] == ["commands.py"]
