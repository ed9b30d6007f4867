"""ppsd_rt/_native.pyi names what the extension has, no more and no less; of what only tests call, that it is there."""

import ast
from pathlib import Path

import ppsd_rt
from ppsd_rt import _native

STUB = Path(ppsd_rt.__file__).with_name("_native.pyi")


def names_in(nodes):
    """Dotted names of what the statements define."""
    for node in nodes:
        if isinstance(node, ast.ClassDef):
            yield node.name
            yield from (f"{node.name}.{name}" for name in names_in(node.body))
        elif isinstance(node, ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.AnnAssign):
            yield node.target.id


def names_of(value):
    for name, part in vars(value).items():
        if not name.startswith("_") or name in ("__init__", "__iter__", "__next__"):
            yield name
            if isinstance(part, type):
                yield from (f"{name}.{inner}" for inner in names_of(part))


def test_the_stub_names_what_there_is():
    written = set(names_in(ast.parse(STUB.read_text()).body))
    built = set(names_of(_native))
    inherited = {name for name in built if name.endswith(".__init__")}  # pybind11 gives one to classes nobody makes
    assert sorted(written - built) == []
    assert sorted(built - written - inherited) == []


def test_every_class_says_what_it_is():
    classes = [node for node in ast.parse(STUB.read_text()).body if isinstance(node, ast.ClassDef)]
    assert len(classes) > 20 and all(map(ast.get_docstring, classes))
    classes = [value for value in vars(_native.testing).values() if isinstance(value, type)]
    assert classes and all(cls.__doc__ for cls in classes)
