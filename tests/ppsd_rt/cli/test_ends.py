"""Why an answer ended, as the command says it, and how far one goes without a limit."""

import json

import pytest
from support import write_model

from ppsd_rt import Engine, Grammar, SamplingParams
from ppsd_rt.cli import main as cli

SCHEMA = {"type": "object", "properties": {"colour": {"enum": ["red"]}}, "required": ["colour"]}
SCHEMA["additionalProperties"] = False


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("ends") / "model", max_position_embeddings=96)


@pytest.fixture
def run(folder, capsys):
    def run(*args):
        status = cli.main([*map(str, args), "--raw", "--model", str(folder), "--dtype", "float32", "--threads", "1"])
        return status, *capsys.readouterr()

    return run


def test_without_a_limit_it_goes_to_the_end_of_the_context(run):
    answers = [run("abc", "--json", *options) for options in ((), ("-n", "-1"), ("-n", "inf"))]
    for status, out, err in answers:
        answer = json.loads(out)
        assert (status, len(answer["ids"]) + 3, answer["finish_reason"]) == (0, 96, "context")
        assert err == "the answer was cut where the context of 96 tokens, or its memory, was full\n"


def test_an_answer_that_ends_by_itself_is_told_from_one_that_was_cut(run):
    text = json.loads(run("abc", "--json", "-n", 9)[1])["text"]
    _, _, err = run("abc", "-n", 9, "--stop", text[3])
    assert [" tokens, stopped | " in err, " cut " in err] == [True, False]
    _, _, err = run("abc", "-n", 1)
    assert err.splitlines()[-1].startswith("1 token, cut by -n | ")  # who gave it knows the way out


def test_a_grammar_that_did_not_end_is_an_error(run):
    schema = f"schema={json.dumps(SCHEMA)}"
    status, out, err = run("abc", "-n", 4, "--grammar", schema)
    assert (status, err.splitlines()[-1]) == (
        1,
        "ppsd-run: the answer was cut at 4 tokens (-n): -n -1 has no limit; by then the grammar could not end",
    )
    status, out, _ = run("abc", "--grammar", schema)
    assert (status, json.loads(out)) == (0, {"colour": "red"})
    assert run("abc", "-n", 2, "--grammar", "regex=a{2}")[0] == 0  # whole, although the limit ended it


def test_without_a_limit_memory_may_end_an_answer(folder):
    """One that needs more than its share of the memory goes on among others, and gives the same tokens."""
    params = SamplingParams(ignore_eos=True)
    roomy = Engine.from_pretrained(folder, exit_head="norm:2", backend="cpu", dtype="float32", threads=1)
    row = int(roomy.backend._row_bytes)
    tight = Engine.from_pretrained(
        folder, exit_head="norm:2", backend="cpu", dtype="float32", threads=1, kv_memory=4 * row * (64 + 40)
    )
    whole, cut = (engine.generate("abc", params).run() for engine in (roomy, tight))
    assert len(whole.ids) == 93
    assert cut.ids == whole.ids
    tiny = Engine.from_pretrained(folder, backend="cpu", dtype="float32", threads=1, kv_memory=row * 70)
    assert tiny.backend.longest < 70
    few = tiny.generate("abc", params)
    assert few._end == max(tiny.backend.longest, 4)


def test_any_json_ends(folder):
    """A model that repeats itself for ever, as small ones do, is at the end after so many members, and so deep."""
    from ppsd_rt.sampling import grammar

    pytest.importorskip("llguidance")
    engine = Engine.from_pretrained(folder, exit_head="none", backend="cpu", dtype="float32", threads=1)

    def allowed(text):
        mask = engine.compile(Grammar.json())()
        ids = engine.tokenizer.encode(text)
        return {chr(id) for id in range(128) if mask.allowed(0, ids)[engine.tokenizer.encode(chr(id))[0]]}

    assert {"[", "{"} <= allowed('{"a":')
    assert {"[", "{"} <= allowed('{"a":[[')
    assert not {"[", "{"} & allowed('{"a":[[[')
    assert "," in allowed("{" + '"a":1,' * (grammar._MEMBERS - 2) + '"a":1')
    assert allowed("{" + '"a":1,' * (grammar._MEMBERS - 1) + '"a":1.0') & {",", "}"} == {"}"}
    assert " " in allowed('{"a": ')
    assert " " not in allowed('{"a":\n' + " " * 24)
