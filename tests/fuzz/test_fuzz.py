"""A short run of every target with fixed seeds; `make fuzz MINUTES=60` is the long one."""

import pytest
from fuzz.file_targets import FILES
from fuzz.known import KNOWN
from fuzz.mutations import PIPE
from fuzz.place import Place
from fuzz.targets import TARGETS, examples
from support import slow

QUICK = {
    *("chat-template", "exit-head", "gguf", "learned", "schedule"),
    *("tokenizer", "tokenizer-config", "weights", "world"),
}
FEW = {"requests": 1, "twin-folder": 3, "twin-tokenizer": 3, "twin-gguf": 3}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    with Place(tmp_path_factory.mktemp("fuzz")).entered() as place:
        yield place


@pytest.mark.parametrize("name", [name if name in QUICK | FEW.keys() else slow(name) for name in TARGETS])
def test_inputs_are_answered_or_refused(place, name):
    if name.startswith("twin"):
        pytest.importorskip("transformers")
    examples(place, name, FEW.get(name, 25), None, lambda value: TARGETS[name][1](place, value))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(KNOWN.keys() | FILES))
def test_inputs_that_once_did_harm_are_answered_or_refused(place, name):
    pipe = [PIPE] if name in FILES and name != "prompts" else []  # prompts may come from one, and wait for its writer
    for value in [*KNOWN.get(name, ()), *pipe]:
        TARGETS[name][1](place, value)
