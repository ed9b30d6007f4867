"""`--chat` as it is typed on a terminal, and the history that it keeps."""

import io
import stat

import prompt_toolkit.output
import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from ppsd_rt import Engine
from ppsd_rt.cli import conversation
from ppsd_rt.cli import main as cli

ENTER, UP, END = "\r", "\x1b[A", "\x04"


def pasted(text):
    return f"\x1b[200~{text}\x1b[201~"


@pytest.fixture
def converse(folder, tmp_path, monkeypatch, capsys):
    """--chat with these keys typed -> (status, messages of every turn that was answered, standard output, error)."""
    monkeypatch.setenv("PPSD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(conversation, "on_terminal", lambda: True)
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


def test_commands_are_not_sent_to_the_model(converse):
    keys = ["a", "/help", "/reset", "b", "/usual it", " /usr is what?", "/usr/bin is what?", "/exit", "never"]
    status, asked, out, err = converse("".join(key + ENTER for key in keys))
    assert (status, turns(asked)) == (0, ["a", "b", "/usr is what?", "/usr/bin is what?"])
    assert [len(messages) for messages in asked] == [1, 1, 3, 5]  # /reset: b is the first turn again
    assert conversation.HELP in out
    assert "ppsd-run: there is no command /usual: see /help" in err


def typed(*lines):
    return "".join(line + ENTER for line in lines) + END


def test_every_command_is_explained_and_obeyed(converse):
    """None ends the conversation, whatever is missing."""
    names = [name.split()[0] for name in conversation.COMMANDS if name != "exit"]
    status, asked, _, err = converse(typed(*(f"/{name}" for name in names), "hi"))
    assert (status, turns(asked)) == (0, ["hi"])
    assert "no command" not in err
    for name, effect in conversation.COMMANDS.items():
        assert f"/{name} " in conversation.HELP and effect in conversation.HELP


def test_other_instructions(converse):
    _, asked, out, _ = converse(typed("/system Be brief.", "a", "/system", "/reset", "b"), "--system", "first")
    assert [messages[0] for messages in asked] == ["Be brief.", "Be brief."]
    assert "system: Be brief." in out


def test_an_answer_can_be_made_again_and_a_turn_taken_back(converse):
    _, asked, _, err = converse(typed("/regenerate", "/undo", "a", "b", "/regenerate", "/undo", "c"))
    assert [messages[::2] for messages in asked] == [["a"], ["a", "b"], ["a", "b"], ["a", "c"]]
    assert "there is no answer to regenerate" in err
    assert "there is no turn to undo" in err
    assert "greedy decoding gives the same answer again" in err
    assert "1 turn left" in err


def test_a_file_goes_with_the_next_turn_only(converse, tmp_path):
    (tmp_path / "notes").write_text("These are notes.")
    _, asked, _, err = converse(typed("/file /no/such", f"/file {tmp_path / 'notes'}", "Sum up.", "b"))
    assert turns(asked) == ["These are notes.\n\nSum up.", "b"]
    assert "/no/such does not exist" in err


CTRL_C = "\x03"


def test_ctrl_c_clears_the_line_and_then_leaves(converse):
    status, asked, _, _ = converse(
        f"not this{CTRL_C}but this{ENTER}{CTRL_C}and this{ENTER}x{CTRL_C}{CTRL_C}never{ENTER}{END}"
    )
    assert (status, turns(asked)) == (0, ["but this", "and this"])


@pytest.mark.parametrize(("said", "kept"), [("\n", False), ("n\n", True)])
def test_a_full_context_offers_to_drop_the_oldest_turns(converse, monkeypatch, said, kept):
    questions = []
    monkeypatch.setattr(
        conversation, "agreed", lambda *asked, **_: questions.append(*asked) or not said.startswith("n")
    )
    long = "x" * 200
    _, asked, _, err = converse(typed("a" + long, "b" + long, "c" + long, "d"))
    assert "the context of 512 tokens is full: drop the oldest" in questions[0]
    assert ("this turn was dropped" in err) == kept
    if kept:
        assert turns(asked)[-1] == "d" and len(questions) == 1
    else:
        assert asked[3][-1] == "c" + long and len(asked[3]) == 1
        assert asked[-1][::2] == ["c" + long, "d"]


def history(tmp_path):
    return tmp_path / "cache" / "chat" / "history.txt"


def test_history_goes_from_one_conversation_to_the_next(converse, tmp_path):
    converse(pasted("first\nturn") + ENTER + END)
    assert turns(converse(UP + ENTER + END)[1]) == ["first\nturn"]
    assert stat.S_IMODE(history(tmp_path).stat().st_mode) == 0o600


def test_a_history_that_is_damaged_or_cannot_be_kept_keeps_nobody_from_talking(converse, tmp_path):
    history(tmp_path).parent.mkdir(parents=True)
    history(tmp_path).write_bytes(b"\xff{[\0\n+")
    assert converse("hi" + ENTER + END)[:2] == (0, [["hi"]])
    history(tmp_path).unlink()
    history(tmp_path).mkdir()
    assert converse("hi" + ENTER + END)[:2] == (0, [["hi"]])


def test_turns_from_a_pipe_are_read_as_files_are(folder, monkeypatch, capsys):
    """Each line is a turn, in either encoding, and of the commands there is only /reset."""
    asked, ask = [], conversation._Conversation.ask

    def heard(self, text):
        asked.append((len(self.turns), text))
        ask(self, text)

    monkeypatch.setattr(conversation._Conversation, "ask", heard)
    for encoding in ("utf-8", "utf-8-sig", "utf-16"):
        content = "tvåĊ\n\n/stats\n/reset\nend\n".encode(encoding)
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(content))))
        args = ["--chat", "--model", str(folder), "--dtype", "float32", "--exit-head", "none", "-n", "2"]
        assert cli.main(args) == 0
        assert [asked.pop(0) for _ in range(3)] == [(0, "tvåĊ"), (2, "/stats"), (0, "end")]
