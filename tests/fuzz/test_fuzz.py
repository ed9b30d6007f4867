"""A short run of every target with fixed seeds; `make fuzz MINUTES=60` is the long one."""

import pytest
from fuzz.known import KNOWN
from fuzz.place import Place
from fuzz.targets import TARGETS, examples
from support import slow

QUICK = {
    *("calibration", "chat-template", "exit-head", "gguf", "handshake", "schedule"),
    *("tokenizer", "tokenizer-config", "weights", "world"),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    with Place(tmp_path_factory.mktemp("fuzz")).entered() as place:
        yield place


@pytest.mark.parametrize("name", [name if name in QUICK else slow(name) for name in TARGETS])
def test_inputs_are_answered_or_refused(place, name):
    examples(place, name, 25, None, lambda value: TARGETS[name][1](place, value))


@pytest.mark.slow
@pytest.mark.parametrize("name", KNOWN)
def test_inputs_that_once_did_harm_are_answered_or_refused(place, name):
    for value in KNOWN[name]:
        TARGETS[name][1](place, value)
