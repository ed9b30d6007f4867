"""`--chat` as it is typed on a terminal, and the history that it keeps."""

import json
import stat

import prompt_toolkit.output
import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput
from support import write_model

from ppsd_rt import Engine
from ppsd_rt.cli import chat
from ppsd_rt.cli import main as cli

ENTER, DOWN_A_LINE, UP, END = "\r", "\x1b\r", "\x1b[A", "\x04"


def pasted(text):
    return f"\x1b[200~{text}\x1b[201~"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("chat") / "model")


@pytest.fixture
def converse(folder, tmp_path, monkeypatch, capsys):
    """--chat with these keys typed -> (status, messages of every turn that was answered, standard output, error)."""
    monkeypatch.setenv("PPSD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(chat, "on_terminal", lambda: True)
    monkeypatch.setattr(prompt_toolkit.output, "create_output", lambda **_: DummyOutput())

    def converse(keys, *args):
        asked = []
        generate = Engine.generate

        def heard(engine, prompt, *rest):
            asked.append([message["content"] for message in prompt])
            return generate(engine, prompt, *rest)

        with create_pipe_input() as pipe, create_app_session(input=pipe), monkeypatch.context() as patch:
            patch.setattr(Engine, "generate", heard)
            pipe.send_text(keys)
            options = ["--model", str(folder), "--dtype", "float32", "--exit-head", "none", "-n", "2", "--threads", "1"]
            status = cli.main(["--chat", *options, *args])
        return status, asked, *capsys.readouterr()

    return converse


def turns(asked):
    return [messages[-1] for messages in asked]


def test_text_that_is_pasted_is_one_turn(converse):
    status, asked, _, err = converse(pasted("one\n  two\r\n\nthree\n") + ENTER + "next" + ENTER + END)
    assert (status, turns(asked)) == (0, ["one\n  two\n\nthree", "next"])
    assert asked[1][0] == "one\n  two\n\nthree"  # the history goes with it
    assert "/help" in err.splitlines()[1]


def test_a_new_line_can_be_typed(converse):
    assert turns(converse(f"one{DOWN_A_LINE}two{ENTER}{END}")[1]) == ["one\ntwo"]


def test_commands_are_not_sent_to_the_model(converse):
    keys = ["a", "/help", "/reset", "b", "/save it", " /usr is what?", "/usr/bin is what?", "/exit", "never"]
    status, asked, out, err = converse("".join(key + ENTER for key in keys))
    assert (status, turns(asked)) == (0, ["a", "b", "/usr is what?", "/usr/bin is what?"])
    assert [len(messages) for messages in asked] == [1, 1, 3, 5]  # /reset: b is the first turn again
    assert chat.HELP in out
    assert "ppsd-run: there is no command /save: see /help" in err


def test_a_pasted_text_that_begins_with_a_command_is_a_text(converse):
    assert turns(converse(pasted("/exit now\nis a command") + ENTER + END)[1]) == ["/exit now\nis a command"]


def test_history_goes_from_one_conversation_to_the_next(converse):
    converse(pasted("first\nturn") + ENTER + END)
    assert turns(converse(UP + ENTER + END)[1]) == ["first\nturn"]
    assert stat.S_IMODE(chat.history_path().stat().st_mode) == 0o600


def test_a_damaged_history_begins_anew(converse):
    chat.history_path().parent.mkdir(parents=True)
    for damaged in ("", "[1]", "{", "[" * 100_000, '"a"'):
        chat.history_path().write_text(damaged)
        assert converse("hi" + ENTER + END)[0] == 0
        assert chat.read_history(chat.history_path()) == ["hi"]


def test_the_history_is_bounded(tmp_path, monkeypatch):
    path = tmp_path / "history.json"
    monkeypatch.setattr(chat, "MOST_TURNS", 3)
    for turn in "abcde":
        chat.keep_turn(path, turn)
    assert chat.read_history(path) == ["c", "d", "e"]
    monkeypatch.setattr(chat, "MOST_BYTES", 100)
    chat.keep_turn(path, "x" * 60)
    chat.keep_turn(path, "y" * 60)
    assert chat.read_history(path) == ["y" * 60]
    chat.keep_turn(path, "z" * 200)
    assert path.stat().st_size <= 100
    assert json.loads(path.read_text()) == []


def test_a_history_that_cannot_be_kept_is_no_error(converse, tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "chat").touch()
    assert turns(converse("hi" + ENTER + END)[1]) == ["hi"]


def test_quiet_leaves_the_answers_and_what_was_asked_for(converse):
    status, asked, out, err = converse(f"hi{ENTER}/help{ENTER}/no{ENTER}{'x' * 600}{ENTER}{END}", "--quiet")
    assert (status, turns(asked)[0]) == (0, "hi")
    assert chat.HELP in out
    unknown, long = err.splitlines()
    assert unknown.startswith("ppsd-run: there is no command /no")
    assert "context of 512" in long
