"""The C++ extension: ppsd_rt/_native.pyi names what it has, no more and no less; what it reads of our classes."""

import ast
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

import ppsd_rt
from ppsd_rt import SamplingParams, UsageError, _native
from ppsd_rt._native import testing
from ppsd_rt.pipeline.rounds import Limits
from ppsd_rt.pipeline.schedule import Schedule, named
from ppsd_rt.sampling.params import LEAST_TEMPERATURE

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


EVERY = SamplingParams(temperature=0.7, top_k=40, top_p=0.9, min_p=0.05, repetition_penalty=1.1, seed=2**64 - 1)


@pytest.mark.parametrize(
    "params",
    [
        EVERY,
        SamplingParams(temperature=LEAST_TEMPERATURE, seed=0),
        SamplingParams(temperature=1 / 3 * 3, top_p=1e-3, seed=1),
    ],
    ids=["every field", "the least temperature", "rounded"],
)
def test_numbers_of_32_bits_come_back_as_they_were_written(params):
    assert testing.read_sampling(params) == params


def test_what_is_no_schedule_is_refused():
    for wrong in (SamplingParams(), {"first_chunk": 1}, None):
        with pytest.raises(TypeError, match="Schedule"):
            testing.StopRule(wrong, 0)


@dataclass(frozen=True)
class Own:
    kind: ClassVar[str] = "own"


@dataclass(frozen=True)
class Nameless:
    threshold: float = 0.5


@pytest.mark.parametrize(("rule", "name"), [(Own(), "own"), (Nameless(), "without a kind")])
def test_a_stop_rule_that_is_not_known_is_an_error(rule, name):
    with pytest.raises(UsageError, match=f"stop rule {name} is unknown; CONTRIBUTING.md says how to add one"):
        testing.StopRule(Schedule(1, 1, 1, stop_rule=rule), 0)


def test_limits_beyond_all_positions():
    """The end is as far away as positions can be counted; stop ids end the text before."""
    limits = Limits(10**30, frozenset({7, 3}))
    rounds = testing.replay(named("plain"), [1, 5, 5, 3], 1, lambda *_: (0, 0.5), limits)
    assert [each.committed for each in rounds] == [(5,), (5,), (3,)]
