"""A short run of every target and campaign with fixed seeds; `make fuzz MINUTES=60` is the long one."""

import pytest
from fuzz.file_targets import FILES
from fuzz.known import KNOWN
from fuzz.mutations import PIPE
from fuzz.place import Place
from fuzz.targets import TARGETS, examples
from support import slow, tiny_model, write_model

QUICK = {
    *("chat-template", "exit-head", "gguf", "learned", "schedule"),
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
@pytest.mark.parametrize("name", sorted(KNOWN.keys() | FILES))
def test_inputs_that_once_did_harm_are_answered_or_refused(place, name):
    pipe = [PIPE] if name in FILES and name != "prompts" else []  # prompts may come from one, and wait for its writer
    for value in [*KNOWN.get(name, ()), *pipe]:
        TARGETS[name][1](place, value)


@pytest.mark.parametrize("kind", ["folder", "tokenizer", "gguf"])
def test_a_few_models_are_what_their_references_say(kind):
    pytest.importorskip("transformers")
    from fuzz.differential import quiet, try_case

    quiet()
    for number in range(3):
        try_case(kind, number)


def test_combined_requests_have_the_answers_that_they_have_alone(tmp_path):
    from fuzz.combined import campaign

    model = write_model(tmp_path / "model", tiny_model(3), max_position_embeddings=2048)
    seen, wrong = campaign(model, 20, seed=0)
    assert wrong == []
    assert seen["answers"] > 13
