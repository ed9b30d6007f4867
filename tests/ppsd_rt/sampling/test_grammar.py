"""Grammars: answers are what they must be, the same with every schedule, and drafts keep to them too."""

import json
import os
import re
import subprocess
import sys
from ctypes import memset
from threading import Event

import numpy as np
import pytest
from support import EOS, GRAMMARS, PROMPT, SCHEMA, VOCAB, slow, write_model

from ppsd_rt import Committed, Engine, Grammar, PpsdError, SamplingParams, UsageError
from ppsd_rt.errors import GrammarFailed
from ppsd_rt.pipeline.rounds import Limits
from ppsd_rt.pipeline.schedule import AUTO, parse_schedule
from ppsd_rt.sampling.grammar import Grammars, TokenMask, words

SCHEDULES = {
    "head": "eesd:length=4,stop_rule=fixed",
    "copies": "eesd:length=4,lookup=1",
    "overlap": "elastic:max_chunk=5,lookahead=8",
    "ppsd": "ppsd:lookahead=3",
    "auto": AUTO,
}
GRAMMARS = {**GRAMMARS, "object": Grammar.json()}
SAMPLINGS = {
    "greedy": {},
    "warm": {"temperature": 1.3, "seed": 2},
    "filters": {"temperature": 1.2, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "frequency_penalty": 0.3, "seed": 3},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("grammar") / "model", num_hidden_layers=6)


@pytest.fixture(
    scope="module",
    params=[slow(("torch", "float32", 1, 1)), ("cpu", "float32", 2, 2), ("cpu", "int8", 1, 1)],
    ids=lambda p: "-".join(map(str, p)),
)
def engine(request, folder):
    backend, dtype, threads, stages = request.param
    return Engine.from_pretrained(
        folder, exit_head="norm:3:200", backend=backend, dtype=dtype, threads=threads, stages=stages
    )


@pytest.fixture(scope="module")
def plain(folder):
    return Engine.from_pretrained(folder, exit_head="norm:3", backend="cpu", dtype="float32", threads=1)


def fits(grammar, text):
    """Of a whole answer."""
    if grammar.kind == "json_schema":
        value = json.loads(text)
        assert isinstance(value, dict)
        if json.loads(grammar.text) == SCHEMA:
            assert set(value) == {"name", "ages"}
            assert isinstance(value["name"], str)
            assert all(isinstance(age, int) for age in value["ages"])
    elif grammar.kind == "regex":
        assert re.fullmatch(grammar.text, text)
    else:
        assert re.fullmatch("((ab|ba)+;[0-9]){4,9}", text)


@pytest.mark.parametrize("grammar", GRAMMARS.values(), ids=GRAMMARS)
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_no_schedule_changes_the_answer_and_all_of_it_fits(engine, grammar, sampling):
    params = SamplingParams(max_tokens=90, grammar=grammar, logprobs=2, **sampling)
    plain = engine.generate(PROMPT, params, "plain").run()
    if plain.finish_reason == "eos":
        fits(grammar, plain.text)
    for name, schedule in SCHEDULES.items():
        answer = engine.generate(PROMPT, params, schedule).run()
        assert (answer.ids, answer.logprobs, answer.finish_reason) == (
            plain.ids,
            plain.logprobs,
            plain.finish_reason,
        ), name


def test_answers_of_every_grammar_do_end(plain):
    """Or the test above compares beginnings alone."""
    for name, grammar in GRAMMARS.items():
        params = SamplingParams(max_tokens=400, grammar=grammar, temperature=1.5)
        done = [plain.generate(PROMPT, SamplingParams(**{**vars(params), "seed": seed})).run() for seed in range(6)]
        ended = [answer for answer in done if answer.finish_reason == "eos"]
        assert ended, name
        for answer in ended:
            fits(grammar, answer.text)
            assert answer.ids[-1] == EOS


def test_what_the_grammar_forces_is_drafted_and_accepted(engine):
    """A head that knows only what the grammar allows is right where only one id is: speculation stays useful."""
    grammar = Grammar.regex("(abcdefghij){9}")
    params = SamplingParams(max_tokens=95, grammar=grammar)
    generation = engine.generate(PROMPT, params, "eesd:length=4,stop_rule=confidence=0.99")
    rounds = [event.round for event in generation.events() if isinstance(event, Committed)]
    assert generation.completion.text == "abcdefghij" * 9
    assert len(rounds) < 25
    assert all(draft.confidence == 1 for round in rounds for draft in round.judged)


def test_copies_that_the_grammar_forbids_are_wrong_drafts(plain):
    """The prompt repeats what may not come."""
    grammar = Grammar.regex("(abc|xyz){20}")
    params = SamplingParams(max_tokens=61, grammar=grammar, temperature=2.0, seed=1)
    without = plain.generate("abq abq abq abcabcq", params, "plain").run()
    answer = plain.generate("abq abq abq abcabcq", params, "lookup").run()
    assert answer.ids == without.ids
    assert answer.statistics.copied_judged > answer.statistics.copied_accepted


def test_a_draft_vocabulary_without_anything_allowed(folder):
    engine = Engine.from_pretrained(folder, exit_head="norm:3:20", backend="cpu", dtype="float32", threads=1)
    for sampling in SAMPLINGS.values():
        params = SamplingParams(max_tokens=30, grammar=Grammar.regex("[a-z]{30}"), **sampling)
        plain = engine.generate(PROMPT, params, "plain").run()
        assert engine.generate(PROMPT, params, SCHEDULES["head"]).run().ids == plain.ids


def test_logprobs_are_of_the_model_not_of_the_grammar(plain):
    grammar = Grammar.regex("z{5}")
    answer = plain.generate(PROMPT, SamplingParams(max_tokens=5, grammar=grammar, logprobs=20)).run()
    assert answer.text == "zzzzz"
    assert all(token.logprob < -0.5 and len(token.top) == 20 for token in answer.logprobs)


@pytest.mark.parametrize("schedule", ["plain", "elastic"])
def test_an_answer_ends_without_pythons_lock(plain, schedule):
    """The thread that decodes it is about to take it, to come back from the mask."""
    asked, go = Event(), Event()

    class Waits:
        def fill(self, start, ids, rows, address):
            asked.set()
            go.wait()
            memset(address, 0xFF, rows * words(VOCAB) * 4)

    backend, masks = plain.backend, (Waits(), Waits())
    limits = Limits(400, frozenset([EOS]))
    answer = backend._answers.loop.add(
        plain.encode("abc"), SamplingParams(), parse_schedule(schedule), limits, masks=masks
    )
    asked.wait()
    go.set()
    answer.close()


def test_python_may_end_while_an_answer_asks_its_grammar(folder):
    script = f"""
from ppsd_rt import Engine, Grammar, SamplingParams
engine = Engine.from_pretrained({str(folder)!r}, exit_head="norm:3", backend="cpu", dtype="float32", threads=1)
answer = engine.generate("abc", SamplingParams(max_tokens=480, grammar=Grammar.regex("[a-z ]+")), "elastic")
next(iter(answer))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=os.environ)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture(scope="module")
def grammars(plain):
    return Grammars(plain.tokenizer, VOCAB, [EOS])


def test_masks_roll_back_and_are_independent(grammars, plain):
    """Whatever was read before, the rows are those of a mask that reads the text for the first time."""
    masks = grammars.masks(GRAMMARS["regex"])
    rng = np.random.default_rng(0)
    used, text = masks(), []
    good = plain.tokenizer.encode("abc de fab abc ddddd xx!")
    for _ in range(300):
        start = int(rng.integers(0, len(text) + 1))
        more = good[start : start + int(rng.integers(0, 6))]
        if rng.random() < 0.3:
            more = [*more, int(rng.integers(0, VOCAB))]
        text = [*text[:start], *more]
        rows = int(rng.integers(1, min(len(text) - start, 4) + 2)) if len(more) else 1
        bits = np.zeros((rows, words(VOCAB)), np.uint32)
        used.fill(start, more, rows, bits.ctypes.data)
        for row in range(rows):
            fresh = masks().allowed(0, text[: len(text) - rows + 1 + row])
            assert np.array_equal(np.unpackbits(bits[row].view(np.uint8), bitorder="little").view(bool), fresh)


def test_masks_allow_what_the_grammar_does(grammars, plain):
    encode = plain.tokenizer.encode

    def allowed(text, more=()):
        ids = [*encode(text), *more] if text else list(more)
        return {id for id in np.nonzero(grammars.masks(Grammar.regex("(ab|cd)+"))().allowed(0, ids))[0] if id < VOCAB}

    assert allowed("") == {*encode("a"), *encode("c")}
    assert allowed("abc") == {*encode("d")}
    assert allowed("ab") == {*encode("a"), *encode("c"), EOS}
    assert allowed("ab", [EOS]) == set(range(VOCAB))  # after the end, and
    assert allowed("abd") == set(range(VOCAB))  # after what may not come


def test_the_prompt_and_an_earlier_answer_are_no_part_of_it(plain):
    first = plain.generate("abc", SamplingParams(max_tokens=6, grammar=Grammar.regex("q{6}"))).run()
    longer = [*first.prompt_ids, *first.ids]
    assert plain.generate(longer, SamplingParams(max_tokens=4, grammar=Grammar.regex("r{4}"))).run().text == "rrrr"


def test_padded_vocabularies(tmp_path_factory):
    """No answer under a grammar has an id that the tokenizer has not."""
    folder = write_model(tmp_path_factory.mktemp("padded") / "model", vocab_size=512)
    for backend in ("cpu", "torch"):
        engine = Engine.from_pretrained(folder, exit_head="norm:1", backend=backend, dtype="float32", threads=1)
        params = SamplingParams(
            max_tokens=40, grammar=Grammar.regex("[a-z ]{5,40}"), temperature=30, seed=1, logprobs=2
        )
        plain = engine.generate(PROMPT, params, "plain").run()
        assert engine.generate(PROMPT, params, SCHEDULES["head"]).run().ids == plain.ids
        assert max(plain.ids) < VOCAB < 512


def test_masks_are_as_wide_as_the_logits(plain):
    """With Qwen2.5's two numbers."""

    class Wide:
        vocab_size, bos_id, special_ids = 151_665, None, frozenset([EOS])
        encode = plain.tokenizer.encode

        def token_bytes(self, id):
            return plain.tokenizer.token_bytes(id) if id < VOCAB else b"~%d" % id

    allowed = Grammars(Wide(), 151_936, [EOS]).masks(Grammar.regex("(?s:.*)"))().allowed(0, [])
    assert allowed.shape == (151_936,)
    assert allowed[EOS + 1 : 151_665].all() and not allowed[151_665:].any()


def test_response_formats():
    of = Grammar.from_response_format
    assert of({"type": "text"}) is None
    assert of({"type": "json_object"}) == Grammar.json()
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    assert of(schema) == Grammar.json_schema(SCHEMA) == Grammar.json_schema(json.dumps(SCHEMA))
    for kind in ("json_schema", "json_object"):  # as llama.cpp, Together and Fireworks take them
        assert of({"type": kind, "schema": SCHEMA}) == Grammar.json_schema(SCHEMA)
    assert of({"type": "regex", "regex": "a+"}) == Grammar.regex("a+")
    for bad, said in (
        ({}, "must have the type text, json_object"),
        ({"type": "xml"}, "not 'xml'"),
        ("json_object", "must have the type"),
        ({"type": "json_schema"}, "needs an object with the key schema"),
        ({"type": "json_schema", "json_schema": {"schema": 5}}, "must be a dict, JSON or a pydantic class"),
        ({"type": "regex", "regex": 5}, "must be a text"),
    ):
        with pytest.raises(UsageError, match=said):
            of(bad)


def test_what_does_not_go_together(plain, monkeypatch):
    with pytest.raises(UsageError, match="ignore_eos does not go with a grammar"):
        SamplingParams(grammar=Grammar.json(), ignore_eos=True)
    with pytest.raises(UsageError, match=r"must be Grammar.json\(\), Grammar.json_schema\(...\)"):
        SamplingParams(grammar={"type": "json_object"})
    with pytest.raises(UsageError, match="stages have no grammar"):
        plain.stages(SamplingParams(grammar=Grammar.json()))
    with monkeypatch.context() as patch:
        patch.setattr(type(plain.backend), "extras", frozenset())
        with pytest.raises(UsageError, match="at a temperature, without grammar: leave it out"):
            plain.generate(PROMPT, SamplingParams(grammar=Grammar.json()))


def test_without_llguidance_the_command_is_named(plain, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(PpsdError, match=r'pip install "ppsd-rt\[grammar\]"'):
        Grammars(plain.tokenizer, VOCAB, [EOS])


def test_a_grammar_that_gives_up_ends_the_answer_in_one_line(plain, monkeypatch):
    """The error comes from the thread of the answer."""

    def gives_up(self, *_):
        raise GrammarFailed("the grammar gives up: too many states")

    monkeypatch.setattr(TokenMask, "fill", gives_up)
    with pytest.raises(PpsdError, match="^the grammar gives up: too many states$"):
        plain.generate(PROMPT, SamplingParams(grammar=Grammar.json())).run()
