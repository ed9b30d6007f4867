"""Prompts out of a file: the same answers, to the bit, and of use for nothing else."""

import os
import stat

import pytest
from support import tiny_model, write_model

from ppsd_rt import Engine, PpsdError, SamplingParams, UsageError, _native
from ppsd_rt.backend import RunOptions
from ppsd_rt.cli import serve
from ppsd_rt.cli.main import main
from ppsd_rt.cpu import prompts

DOCUMENT = [(7 * i * i + 3 * i) % 250 for i in range(200)]
SPAN = 64  # positions of a block
HEADER = 4096
OPTIONS = {"exit_head": "norm:1", "backend": "cpu", "dtype": "int8", "threads": 1, "kv_memory": 1 << 24}


SHAPE = {"head_dim": 32}  # an int8 KV cache takes it


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("wide") / "model", **SHAPE)


def load(folder, **changes):
    return Engine.from_pretrained(folder, **OPTIONS | changes)


def ask(engine, ids, schedule="auto", **params):
    return engine.generate(ids, SamplingParams(max_tokens=12, logprobs=1, **params), schedule).run()


def read(engine):
    """Rows of prompts that were computed."""
    return engine.backend._answers.loop.counts["prompt_rows"]


@pytest.fixture
def file(folder, tmp_path):
    """With what an engine knows that has answered one question about the document."""
    engine = load(folder)
    ask(engine, [*DOCUMENT, 1, 2, 3])
    path = tmp_path / "prompts"
    assert engine.save_prompts(path) == 4
    return path


def test_what_is_not_to_be_kept_is_in_no_file(folder, tmp_path):
    """But the beginning that it has in common with what is; in memory it is shared as ever."""
    engine, path, params = load(folder), tmp_path / "prompts", SamplingParams(max_tokens=12)
    secret = [*DOCUMENT, *range(1, 40)]
    for _ in range(2):
        engine.generate(secret, params, options=RunOptions(kept=False)).run()
        assert engine.save_prompts(path) == 0
    assert read(engine) < 1.5 * len(secret)
    ask(engine, [*DOCUMENT, *range(50, 90)])
    assert engine.save_prompts(path) == 4
    other = load(folder)
    assert other.load_prompts(path) == 4
    ask(other, secret)
    assert len(secret) - len(DOCUMENT) <= read(other) < len(secret) / 2


@pytest.mark.parametrize("kv_dtype", ["int8", "bfloat16", "float32"])
@pytest.mark.parametrize("schedule", ["plain", "eesd", "ppsd", "auto"])
def test_answers_are_the_same(folder, tmp_path, schedule, kv_dtype):
    one = load(folder, kv_dtype=kv_dtype)
    ask(one, [*DOCUMENT, 1, 2, 3], schedule)
    one.save_prompts(tmp_path / "prompts")
    for temperature in (0.0, 0.8):
        two, fresh = load(folder, kv_dtype=kv_dtype), load(folder, kv_dtype=kv_dtype)
        two.load_prompts(tmp_path / "prompts")
        question = [*DOCUMENT, 4, 5]
        answers = [ask(engine, question, schedule, temperature=temperature, seed=5) for engine in (two, fresh)]
        assert answers[0].ids == answers[1].ids and answers[0].logprobs == answers[1].logprobs
        assert (read(two), read(fresh)) == (2, len(question))  # the document's rows came from the file


def test_only_the_common_beginning_counts(folder, file):
    engine = load(folder)
    assert engine.load_prompts(file) == 4
    other = [*DOCUMENT[:100], 249, *DOCUMENT[101:]]
    assert ask(engine, other).ids == ask(load(folder), other).ids
    assert read(engine) == len(other) - 100


def test_whose_file_it_is(file):
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [path.name for path in file.parent.iterdir()] == [file.name]


@pytest.mark.parametrize(
    ("place", "lost"),
    [(HEADER + 3, 4), (HEADER + 400, 4), (-1, 1), (-5000, 1), (None, 1)],
    ids=["first checksum", "first block", "last byte", "last block", "cut"],
)
def test_a_damaged_block_is_as_if_it_were_not_there(folder, file, place, lost):
    """Nor are those that stand after it."""
    content = bytearray(file.read_bytes())
    if place is None:
        del content[-10:]
    else:
        content[place] ^= 64
    file.write_bytes(content)
    engine = load(folder)
    assert engine.load_prompts(file) == 4 - lost
    question = [*DOCUMENT, 1, 2, 9]
    assert ask(engine, question).ids == ask(load(folder), question).ids


def test_files_of_something_else_are_refused(folder, tmp_path, file):
    for changes, what in (
        ({"dtype": "float32", "kv_dtype": "int8"}, "format"),
        ({"kv_dtype": "bfloat16"}, "format"),
        ({"exit_head": "none"}, "exit head"),
    ):
        for use in (Engine.load_prompts, Engine.save_prompts):
            with pytest.raises(PpsdError, match=f"holds prompts of .*{what}.*: name another file, or remove it"):
                use(load(folder, **changes), file)
    text = tmp_path / "notes.txt"
    text.write_text("mine")
    for use in (Engine.load_prompts, Engine.save_prompts):
        with pytest.raises(PpsdError, match=r"notes\.txt holds no saved prompts: name another file"):
            use(load(folder), text)
    assert text.read_text() == "mine"


def test_another_models_file_is_refused(tmp_path, file):
    other = load(write_model(tmp_path / "other", tiny_model(seed=3, **SHAPE), **SHAPE))
    with pytest.raises(PpsdError, match="holds prompts of .*weights"):
        other.load_prompts(file)
    longer = load(write_model(tmp_path / "longer", rope_theta=5e5, **SHAPE))
    with pytest.raises(PpsdError, match="configuration"):
        longer.load_prompts(file)


@pytest.mark.parametrize("content", [b"", b'{"ppsd-rt": "prompts"', b'{"ppsd-rt": "prompts", "of": 3}'])
def test_a_damaged_header_is_as_if_there_were_no_file(folder, tmp_path, content):
    path = tmp_path / "prompts"
    path.write_bytes(content)
    engine = load(folder)
    if not content:
        with pytest.raises(PpsdError, match="holds no saved prompts"):
            engine.load_prompts(path)
        return
    assert engine.load_prompts(path) == 0
    ask(engine, DOCUMENT)
    assert engine.save_prompts(path) > 0 and load(folder).load_prompts(path) > 0


def test_kernels_of_another_build_read_the_prompt_again(folder, file, monkeypatch):
    monkeypatch.setattr("ppsd_rt.cpu.backend.__version__", "0.0.1")
    assert load(folder).load_prompts(file) == 0
    if len(_native.usable_isas()) > 1:
        monkeypatch.undo()
        monkeypatch.setenv("PPSD_ISA", _native.usable_isas()[-1])
        assert load(folder).load_prompts(file) == 0


def test_no_file_is_no_prompts(folder, tmp_path):
    assert load(folder).load_prompts(tmp_path / "none") == 0
    with pytest.raises(PpsdError, match="cannot save prompts to .*: No such file"):
        load(folder).save_prompts(tmp_path / "no folder" / "file")


def test_the_least_recently_used_are_left_out(folder, tmp_path):
    engine, path = load(folder), tmp_path / "prompts"
    old, new = DOCUMENT[:130], [9, *DOCUMENT[:129]]
    for text in (old, new):
        ask(engine, text)
    engine.save_prompts(path, most=2 * engine.backend._answers.loop.block_bytes)
    other = load(folder)
    assert other.load_prompts(path) == 2
    ask(other, old)
    assert read(other) == len(old)
    ask(other, new)
    assert read(other) == len(old) + len(new) - 2 * SPAN


def test_what_has_no_room_is_left_out(folder, file):
    """The beginning of the text comes first."""
    first = load(folder)
    engine = load(folder, kv_memory=3 * first.backend._answers.loop.block_bytes)
    assert engine.load_prompts(file) == 3
    assert engine.load_prompts(file) == 0  # it is there
    assert ask(engine, DOCUMENT[:70]).ids == ask(load(folder), DOCUMENT[:70]).ids


def test_answers_go_on_while_prompts_are_saved(folder, tmp_path):
    engine = load(folder)
    going = engine.generate(DOCUMENT, SamplingParams(max_tokens=60))
    next(going)
    assert engine.save_prompts(tmp_path / "prompts") >= 3
    assert going.run().ids == load(folder).generate(DOCUMENT, SamplingParams(max_tokens=60)).run().ids


def test_other_backends_say_so(folder):
    engine = Engine.from_pretrained(folder, exit_head="none", backend="torch")
    with pytest.raises(UsageError, match="by the cpu backend"):
        engine.save_prompts("file")


def test_an_interrupted_save_leaves_the_file_before(folder, file, monkeypatch):
    before = file.read_bytes()
    monkeypatch.setattr(prompts.os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, os.strerror(28))))
    with pytest.raises(PpsdError, match="No space left"):
        load(folder).save_prompts(file)
    assert file.read_bytes() == before
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_the_command_keeps_them(folder, tmp_path, capsys, monkeypatch):
    loaded, real = [], Engine.load_prompts
    monkeypatch.setattr(Engine, "load_prompts", lambda self, file: loaded.append(real(self, file)))
    path = tmp_path / "prompts"
    options = ["--exit-head", "none", "--backend", "cpu", "--dtype", "int8", "--kv-memory", "16M", "--threads", "1"]
    command = ["-m", str(folder), *options, "--raw", "-q", "-n", "5", "--prompt-cache", str(path), "abc " * 40]
    answers = [(main(command), capsys.readouterr().out) for _ in range(2)]
    assert answers[0] == answers[1] and answers[0][0] == 0
    assert loaded == [0, 3]
    path.write_text("mine")
    assert main(command) == 1
    assert "holds no saved prompts" in capsys.readouterr().err and path.read_text() == "mine"


def test_a_server_keeps_those_of_the_models_that_it_served_last(folder, tmp_path, monkeypatch):
    place = tmp_path / "kept"
    with serve._prompt_cache(load(folder), place):
        pass
    (own,) = place.iterdir()
    old, new, other = place / "old.prompts", place / "new.prompts", place / "notes.txt"
    for number, file in enumerate((old, new, other)):
        file.write_bytes(bytes(1000))
        os.utime(file, (number, number))
    engine = load(folder)
    monkeypatch.setattr(serve, "_PROMPTS", 1000 + HEADER)
    with serve._prompt_cache(engine, place):
        pass
    assert {path.name for path in place.iterdir()} == {own.name, "new.prompts", "notes.txt"}
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    monkeypatch.setattr(serve, "_PROMPTS", 1 << 30)
    with serve._prompt_cache(engine, place):
        ask(engine, DOCUMENT)
    again = load(folder)
    with serve._prompt_cache(again, place):
        ask(again, DOCUMENT)
    assert read(again) == len(DOCUMENT) % SPAN
