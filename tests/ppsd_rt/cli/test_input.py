"""What becomes the prompt: the argument, files, what is piped in; and words that are commands elsewhere."""

import io
import json
import shutil
import subprocess
import sys

import pytest

from ppsd_rt import Engine, UsageError
from ppsd_rt.cli import common
from ppsd_rt.cli import main as cli
from ppsd_rt.cli.commands import COMMANDS
from ppsd_rt.cli.parser import parse
from ppsd_rt.models.cache import kept_gguf


@pytest.fixture(scope="module")
def text_of(folder):
    """The prompt of a command line, as the model gets it."""
    tokenizer = Engine.from_pretrained(folder, exit_head="none", threads=1).tokenizer

    def text_of(*args, **options):
        command = [sys.executable, "-m", "ppsd_rt", "--model", folder, "-n", "1", "--json", "--raw", *args]
        result = subprocess.run(command, capture_output=True, text=True, **options)
        assert result.returncode == 0, result.stderr
        return [tokenizer.decode(json.loads(line)["prompt_ids"]) for line in result.stdout.splitlines()]

    return text_of


def test_what_is_piped_comes_before_the_prompt(text_of, tmp_path):
    assert text_of("Summarise:", input="one\ntwo\n") == ["one\ntwo\n\nSummarise:"]
    assert text_of("Summarise:", stdin=subprocess.DEVNULL) == ["Summarise:"]


def test_files_come_before_the_prompt(text_of, tmp_path):
    for name in "ab":
        (tmp_path / name).write_text(f"this is {name}\n")
    files = ["-f", tmp_path / "a", "-f", tmp_path / "b"]
    assert text_of("Compare.", *files, input="and this") == ["this is a\n\nthis is b\n\nand this\n\nCompare."]
    assert text_of(*files, stdin=subprocess.DEVNULL) == ["this is a\n\nthis is b"]


def test_standard_input_is_read_as_files_are(text_of, tmp_path):
    """With a mark at its head, and in the two encodings that have one, a prompt and JSON lines are what they are."""
    for encoding in ("utf-8-sig", "utf-16"):
        for content, args, expected in (
            ("två 😀", (), ["två 😀"]),
            ('{"prompt": "ett"}\n{"prompt": "två"}\n', ("--prompts", "-"), ["ett", "två"]),
        ):
            (tmp_path / "given").write_bytes(content.encode(encoding))
            with (tmp_path / "given").open("rb") as given:
                assert text_of(*args, stdin=given) == expected
        assert text_of("-f", tmp_path / "given", stdin=subprocess.DEVNULL)[0].startswith('{"prompt": "ett"}')


def test_a_wait_for_standard_input_is_told(monkeypatch, caplog):
    begun, caught = [], caplog.set_level("INFO", "ppsd_rt")

    class Timer:  # the second is over as soon as it begins
        def __init__(self, seconds, tell, what):
            begun.append(seconds)
            self.start, self.cancel = lambda: tell(*what), lambda: begun.append("cancelled")

    monkeypatch.setattr(common, "Timer", Timer)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a text")))
    assert (common.standard_input(), begun, caught) == ("a text", [1.0, "cancelled"], None)
    assert caplog.messages == ["reading standard input to its end; < /dev/null leaves it out"]


def test_json_is_json_where_the_stream_is_ascii(monkeypatch):
    for encoding, expected in (("ascii", b'"\\u00e5 \\ud83d\\ude00"\n'), ("utf-8", '"å 😀"\n'.encode())):
        stream = io.TextIOWrapper(io.BytesIO(), encoding, "backslashreplace")
        monkeypatch.setattr("sys.stdout", stream)
        common.print_json("å 😀")
        assert stream.buffer.getvalue() == expected


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--seed", "4"], "greedy decoding leaves --seed without effect: add --temperature"),
        (["--top-p", "0.9", "--top-k", "3"], "greedy decoding leaves --top-k and --top-p without effect"),
        (["-t", "2"], "-t 2 is a temperature, at which text falls apart; CPU threads are --threads"),
        (["-t", "0.8", "--seed", "4", "--top-p", "0.9"], None),
    ],
)
def test_options_that_do_nothing_or_too_much_are_told(options, said, caplog):
    caplog.set_level("INFO", "ppsd_rt")
    common.sampling_params(parse(["x", *options]))
    assert [message.startswith(said) for message in caplog.messages] == [True] * (said is not None)


def test_conversations_get_the_chat_template(folder, tmp_path, capsys):
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"id": 7, "messages": messages}) + "\n")
    options = ["--prompts", str(prompts), "--json", "-n", "1", "--model", str(folder)]
    assert cli.main(options) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["id"] == 7
    assert answer["prompt_ids"] == Engine.from_pretrained(folder, exit_head="none", threads=1).encode(messages)
    assert cli.main([*options, "--system", "x"]) == 2
    assert "--system does not go with messages" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "instead"),
    [("ls", "list"), ("models", "list"), ("ps", "list"), ("show", "info"), ("remove", "rm"), ("lst", "list")],
)
def test_commands_of_other_programs_are_no_prompts(word, instead):
    with pytest.raises(UsageError, match=f"write ppsd-run {instead}"):
        parse([word])
    assert parse(["--", word]).prompt == word


@pytest.mark.parametrize(
    ("line", "expected"),
    [("ppsd-run hea", {"heads"}), ("ppsd-run --gram", {"--grammar"}), ("ppsd-run list --", {"--json"})],
)
def test_completions(line, expected, tmp_path):
    """As the scripts of argcomplete ask for them."""
    answers = tmp_path / "answers"
    code = (
        "import os; fd = os.open(os.environ['ANSWERS'], os.O_WRONLY | os.O_CREAT); os.dup2(fd, 8); os.dup2(2, 9)\n"
        "from ppsd_rt.cli.main import main; main(['x'])"
    )
    asked = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_IFS": "\n"}
    environment = {"PATH": "", "ANSWERS": str(answers), "_ARGCOMPLETE_SUPPRESS_SPACE": "1", **asked}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    found = set(answers.read_text().split("\n"))
    assert expected <= found
    assert not found & set(COMMANDS) - expected


@pytest.fixture
def caches(tmp_path, monkeypatch, folder):
    """Two models of the hub, one of which is incomplete, and one that was fetched."""
    monkeypatch.setenv("PPSD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    whole = tmp_path / "hub" / "models--org--tiny" / "snapshots" / "abc"
    whole.parent.mkdir(parents=True)
    shutil.copytree(folder, whole)
    (tmp_path / "hub" / "models--org--cut" / "snapshots" / "abc").mkdir(parents=True)

    def fetch(work):
        (work / "x").write_bytes(b"GGUF")
        return work / "x"

    kept_gguf(tmp_path / "cache" / "models" / "smollm2-135m-gguf", "source", "smollm2-135m.gguf", fetch)
    return tmp_path


def test_models_that_are_here_are_listed(caches, capsys):
    assert cli.main(["list", "--json"]) == 0
    found = {model["name"]: model for model in map(json.loads, capsys.readouterr().out.splitlines())}
    assert {name: model["stored_as"] for name, model in found.items()} == {
        "smollm2-135m": "cannot be loaded",
        "org/cut": "incomplete",
        "org/tiny": "float32",
    }
    assert found["org/tiny"]["bytes"] > 10_000
    assert found["org/tiny"]["exit_head"] == "none"
    assert cli.main(["list"]) == 0
    assert "org/tiny" in capsys.readouterr().out
