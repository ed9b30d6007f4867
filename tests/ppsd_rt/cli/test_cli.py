"""`ppsd-run` as a user meets it: what it prints, its exit status, and one line for everything that goes wrong."""

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
from shlex import quote

import numpy as np
import pytest
import torch
from support import EOS, tiny_head, tiny_model, write_model

from ppsd_rt import Engine, PpsdError, UsageError
from ppsd_rt.bench.cli.check import SCHEDULES
from ppsd_rt.cli import generate
from ppsd_rt.cli import main as cli
from ppsd_rt.cli.commands import COMMANDS
from ppsd_rt.cli.parser import parse
from ppsd_rt.cli.ranks import rank_options
from ppsd_rt.generation import Generation
from ppsd_rt.models.checkpoint import Checkpoint
from ppsd_rt.pipeline.schedule import NAMES
from ppsd_rt.pipeline.stop_rules import STOP_RULES

OPTIONS = """--model --exit-head --schedule --dtype --backend --device --threads --max-tokens --seed --stop
--temperature --top-k --top-p --min-p --repetition-penalty --presence-penalty --frequency-penalty""".split()  # noqa: SIM905 (reads better)


@pytest.fixture(scope="module")
def head(folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("head") / "head.safetensors"
    tiny_head(tiny_model(), hash=Checkpoint(folder).hash).save(path)
    return path


@pytest.fixture
def run(folder, capsys):
    """ppsd-run in this process, with the tiny model -> (status, standard output, standard error)."""

    def run(*args, model=True):
        threads = torch.get_num_threads()
        status = cli.main([*map(str, args), *(["--model", str(folder), "--dtype", "float32"] if model else [])])
        torch.set_num_threads(threads)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def test_help_names_every_command_and_option(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--help-all"])
    text = capsys.readouterr().out
    words = set(re.split(r"[^\w=-]+", text))
    assert {*" ".join(COMMANDS).split(), *OPTIONS, *NAMES, *STOP_RULES} <= words
    assert text.partition("examples:")[2].count("ppsd-run") == 2


def test_help_shows_what_one_needs(capsys):
    """The others are told by --help-all, and of commands with few options by --help."""

    def shown(*args):
        with pytest.raises(SystemExit, match="0"):
            cli.main(args)
        return capsys.readouterr().out

    options = re.findall(r"^  (?:-\w[ \w]*, )?(--[\w-]+)", shown("--help"), re.MULTILINE)
    assert len(set(options) - {"--help", "--help-all"}) == 15
    assert {"--model", "--max-tokens", "--threads", "--chat"} < set(options)
    assert "--cors" not in shown("--help-all")
    assert "--grace" in shown("serve", "--help-all") and "--grace" not in shown("serve", "--help")
    assert "--yes" in shown("cache", "--help")
    for lab in (shown("lab", "--help"), shown("lab", "-h"), shown("help", "lab")):
        assert [line.split()[1] for line in lab.splitlines()[2:]] == ["bench", "simulate", "eval"]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command, capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main([*command.split(), "--help"])
    text = capsys.readouterr().out
    assert text.partition("examples:")[2].count("ppsd-run ") == 2
    assert not re.search(r"\]\s+\[[^\]]*\]$", text.partition("\n\n")[2], re.MULTILINE)  # a default that is shown twice


@pytest.mark.parametrize("module", ["argparse", "ppsd_rt.ranks.world", "ppsd_rt.cli.parser", "ppsd_rt.cli.generate"])
def test_an_interruption_while_it_starts_is_one_line(module):
    code = """
import sys
class Interrupted:
    def find_spec(name, *_):
        if name == sys.argv[1]:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupted)
from ppsd_rt.cli.main import main
sys.exit(main(["hello"]))
"""
    result = subprocess.run([sys.executable, "-c", code, module], capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "\nppsd-run: interrupted\n")


def test_the_cpu_backend_answers_without_torch(folder):
    """Nor with anything else that takes long to import and is not needed."""
    code = """
import sys
from ppsd_rt.cli import main
assert main.main(sys.argv[1:]) == 0
slow = {"torch", "transformers", "gguf", "sentencepiece", "rich", "huggingface_hub", "prompt_toolkit"}
print(*sorted(slow & set(sys.modules)))
import ppsd_rt.bench.cli.heads, ppsd_rt.bench.cli.simulate
assert "matplotlib" not in sys.modules  # until a plot is asked for
"""
    command = [sys.executable, "-c", code, "hello", "--model", folder, "--backend", "cpu", "-n", "3"]
    for head in ("none", "norm:2"):
        result = subprocess.run([*command, "--exit-head", head], capture_output=True, text=True, check=True)
        assert result.stdout.splitlines()[-1] == ""


def test_answer_and_statistics(run, head):
    status, out, err = run("hello", "--exit-head", head, "--max-tokens", 20, "--raw", "--compare", "--schedule", "eesd")
    assert status == 0
    assert out.endswith("\n")
    assert re.search(
        r"^20 tokens, cut by -n \| [\d.]+ tokens/s \| first after \d+ ms \| acceptance [\d.]+ \| "
        r"[\d.]+ tokens per pass \| "
        r"eesd, cpu float32, \d+ threads? \| ([\d.]+x|no difference from) plain decoding .*in 4 turns\)$",
        err.strip(),
    )


def test_an_answer_that_differs_from_plain_decoding_is_printed(run, monkeypatch):
    def differs(*_, printed):
        raise PpsdError("it differs")

    monkeypatch.setattr(generate, "compare", differs)
    status, out, err = run("hello", "--json", "--compare", "-n", 5)
    assert (status, len(json.loads(out)["ids"])) == (1, 5)
    assert err.splitlines()[-1] == "ppsd-run: it differs"


def test_an_interrupted_answer_ends_with_what_was_held_back(run, monkeypatch):
    """The text might still have become the beginning of a stop string."""
    text = json.loads(run("abc", "--json", "-n", 6, "--raw", "-t", 1, "--seed", 1)[1])["text"]
    real, left = Generation._next, iter(range(6))

    def six(generation):
        if next(left, None) is None:
            raise KeyboardInterrupt
        return real(generation)

    monkeypatch.setattr(Generation, "_next", six)
    options = ("--raw", "-t", 1, "--seed", 1, "-n", 40, "--schedule", "plain", "--stop", text[-2:] + "\0")
    status, out, err = run("abc", *options)
    assert (status, out) == (130, text + "\n")
    assert "6 tokens, interrupted |" in err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--rank-timeout", "nan"], "--rank-timeout"),
        (["--rank-timeout", "1e30"], "--rank-timeout"),
        (["--link-ms", "nan"], "--link-ms"),
        (["--link-ms", "15000"], "10000"),
        (["--link-ms", "500", "--rank-timeout", "0.9"], "450"),
        (["--backend", "cuda"], "ranks run on CPUs"),
    ],
)
def test_what_ranks_refuse(options, words):
    with pytest.raises(UsageError, match=words):
        rank_options(parse(["hello", *options]), 1)
    allowed = rank_options(parse(["hello", "--link-ms", "2000", "--rank-timeout", "5"]), 1)
    assert (allowed.link_delay, allowed.silence) == (2, 5)


def test_without_a_head_only_repetitions_are_drafted_and_it_says_so(run):
    status, _, err = run("hello", "-n", 5)
    assert status == 0
    assert "has no exit head: only repetitions and what usually follows are drafted" in err
    assert "recycle, cpu" in err


def test_json_for_a_file_of_prompts(run, head, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"id": "a", "prompt": "one"}\n\n{"id": 2, "prompt": "två", "family": "x"}\n', encoding="utf-8")
    status, out, err = run("--prompts", path, "--json", "--exit-head", head, "-n", 9, "--compare")
    assert (status, err) == (0, "")
    answers = [json.loads(line) for line in out.splitlines()]
    assert [answer["id"] for answer in answers] == ["a", 2]
    for answer in answers:
        assert set(answer) == {"id", "prompt_ids", "ids", "text", "finish_reason", "seed", "stats"}
        wanted = (
            "tokens seconds tokens_per_second ttft_seconds rounds acceptance tokens_per_round schedule backend dtype"
        )
        assert set(wanted.split()) <= set(answer["stats"])
        assert answer["stats"]["tokens"] == len(answer["ids"])
        assert answer["stats"]["plain"]["rounds"] >= answer["stats"]["rounds"]
        assert [set(turn) for turn in answer["stats"]["turns"]] == [{"seconds", "plain_seconds"}] * 4


def test_chat_template_applies_unless_raw(run):
    chat = json.loads(run("hi", "--json", "-n", 2)[1])["prompt_ids"]
    raw = json.loads(run("hi", "--json", "-n", 2, "--raw")[1])["prompt_ids"]
    system = json.loads(run("hi", "--json", "-n", 2, "--system", "be brief")[1])["prompt_ids"]
    assert len(raw) == 2 < len(chat) < len(system)


def test_a_model_without_a_chat_template_says_so(folder, tmp_path, run):
    """Unless the text was meant to be continued."""
    shutil.copytree(folder, tmp_path / "model")
    (tmp_path / "model" / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    options = ["--model", tmp_path / "model", "--dtype", "float32", "-n", 2]
    for args, said in ((["hi"], True), (["hi", "--json"], True), (["hi", "--raw"], False)):
        status, _, err = run(*args, *options, model=False)
        assert (status, "has no chat template: the prompt is continued as plain text" in err) == (0, said)
    assert "no chat template" not in run("hi", "-n", 2)[2]


def test_single_words_are_prompts_and_commands_where_that_is_said():
    for word in ("Hello", "hello", "what", "even", "heat", "informal"):
        assert parse([word]).prompt == parse(["--raw", word]).prompt == word
    for word in ("chatt", "info", "help"):
        assert parse(["--", word]).prompt == parse(["generate", word]).prompt == word


def test_seed_and_stop(run):
    def text(*args):
        return json.loads(run("abc", "--json", "-n", 40, *args)[1])["text"]

    warm = [text("--temperature", 1, "--seed", seed) for seed in (1, 1, 2)]
    assert warm[0] == warm[1] != warm[2]
    stop = warm[0][5:7]
    assert text("--temperature", 1, "--seed", 1, "--stop", "never", "--stop", stop) == warm[0][: warm[0].index(stop)]


def test_check_finds_no_difference(run, head, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"id": "a", "prompt": "one"}\n{"id": "b", "prompt": "two"}\n')
    status, out, _ = run("check", "--prompts", path, "-n", 16, "--exit-head", head, "--json")
    result = json.loads(out)
    assert (status, result["differences"], result["answers"]) == (0, [], 2 * 4 * len(SCHEDULES))
    assert any(row["acceptance"] for row in result["rows"])


def test_check_reports_the_first_difference_with_both_logits(run, head, tmp_path, monkeypatch):
    """Break exactness on purpose: a verification that looks at the wrong row."""
    from ppsd_rt.reference.passes import TorchPasses

    right = TorchPasses.logits

    def wrong(self, rows):
        return np.roll(right(self, rows), 1, 0)

    monkeypatch.setattr(TorchPasses, "logits", wrong)
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"id": "a", "prompt": "one"}\n')
    args = ("check", "--prompts", path, "-n", 12, "--exit-head", head, "--backend", "torch")
    args += ("--schedule", "eesd:stop_rule=fixed")
    status, out, _ = run(*args, "--sampling", "greedy", "--json")
    assert status == 1
    (difference,) = json.loads(out)["differences"]
    logit = r"\(logit [-\d.]+\)"
    place = "a, greedy, eesd:stop_rule=fixed: at token "
    assert re.fullmatch(rf"{place}\d+ plain decoding gives \d+ {logit}, this schedule \d+ {logit}", difference)
    assert "1 differences from plain decoding in 1 answers" in run(*args, "--sampling", "greedy")[1]


def test_info(run, head):
    status, out, _ = run("info", "--exit-head", head, "--json")
    said = json.loads(out)
    assert status == 0
    assert (said["exit head"]["kind"], said["exit head"]["exit_layer"]) == ("layer", 2)
    assert said["model"]["num_hidden_layers"] == 4
    assert {"torch", "cpu", "cores"} <= set(said["machine"])
    assert said["backend"]["isa"] in said["backend"]["usable_isas"]
    summary = run("info", "--exit-head", head)[1]
    for words in ("4 layers, width 64", "exit head  layer after layer 2", "cpu, float32", "ppsd-run info --json"):
        assert words in summary
    assert "exit head  none" in run("info", "--exit-head", "none")[1]


def test_template_variables(tmp_path, run):
    template = "{% if think %}<think>{% endif %}{{ messages[0].content }}{{ name }}{{ bos_token }}"
    folder = write_model(tmp_path / "m")
    settings = {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    model = ("--model", folder, "--dtype", "float32", "-n", 1, "--json")

    def prompt_of(*args):
        status, out, _ = run("hi", *model, *args, model=False)
        return status, Engine.from_pretrained(folder).tokenizer.decode(json.loads(out)["prompt_ids"])

    assert prompt_of() == (0, "hi")
    assert prompt_of("--template-set", "think=true", "--template-set", "name=Ada") == (0, "<think>hiAda")
    assert prompt_of("--template-set", "think=false", "--template-set", 'name=["a"]') == (0, "hi['a']")
    status, _, err = run("hi", *model, "--template-set", "thinking=true", model=False)
    assert (status, "does not read 'thinking'; it reads bos_token, name, think" in err) == (2, True)
    status, _, err = run("hi", *model, "--template-set", "think", model=False)
    assert (status, "not of the form NAME=JSON" in err) == (2, True)
    said = json.loads(run("info", "--model", folder, "--json", model=False)[1])["model"]
    assert said["template_variables"] == ["name", "think"]
    assert said["ends_at"] == {str(EOS): "<|im_end|>"}

    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": 3}))
    assert run("hi", *model, "--raw", model=False)[0] == 0
    assert "tokenizer_config.json: chat_template is" in run("hi", *model, model=False)[2]
    assert json.loads(run("info", "--model", folder, "--json", model=False)[1])["model"]["template_variables"] == []


def test_no_eos_in_any_file_of_the_model_ends_at_the_tokenizers(tmp_path):
    folder = write_model(tmp_path / "m", model_type="qwen2", architectures=["Qwen2ForCausalLM"], eos_token_id=None)
    assert Checkpoint(folder).config.eos_token_ids == ()
    assert Engine.from_pretrained(folder).config.eos_token_ids == (EOS,)


@pytest.mark.parametrize(
    ("args", "status", "words"),
    [
        (["x", "--model", "/no/such/folder"], 1, "/no/such/folder"),
        (["x", "--model", "smolm2-135m"], 1, "smollm2-135m"),
        (["x", "--temperature", "-1"], 2, "temperature"),
        (["x", "--logprobs", "21", "--json"], 2, "logprobs"),
        (["x", "--logprobs", "2"], 2, "--logprobs needs --json"),
        (["x", "--schedule", "warp"], 2, "warp"),
        (["x", "--no-such-option"], 2, "--no-such-option"),
        (["x", "y"], 2, "y"),
        (["x", "--chat"], 2, "two of them"),
        (["x", "--json", "--show-drafts"], 2, "--show-drafts"),
        (["x", "--show-drafts"], 2, "terminal"),
        (["--prompts", "/no/such/file"], 2, "/no/such/file"),
        (["check", "--sampling", "hot"], 2, "hot"),
        (["x", "--threads", "0"], 2, "threads"),
        (["check", "--limit", "0"], 2, "--limit"),
        (["distill", "--out", "x.bin"], 2, ".safetensors"),
        (["distill", "--out", "/dev/null/x.safetensors"], 1, "/dev/null"),
        (["chatt"], 2, "'chatt' is not a command: write ppsd-run --chat (as a prompt it goes after --"),
        (["chekc", "--limit", "3"], 2, "write ppsd-run check "),
        (["--raw", "info"], 2, "the command info comes first: write ppsd-run info "),
        (["x", "--temprature", "0.5"], 2, "unknown option '--temprature'; did you mean --temperature?"),
        (["lab", "bench", "generate", "--propmts=x"], 2, "unknown option '--propmts'; did you mean --prompts?"),
        (["--", "info", "--json"], 2, "--json must come before --"),
        (["x", "--trace", ""], 2, "argument --trace: the name is empty"),
        (["x", "--stages", "two"], 2, "argument --stages: 'two' is not a whole number"),
        (["x", "--max-tokens", "9" * 5000], 2, "--max-tokens"),
        (["x", "--device", "cuda:128", "--backend", "torch"], 2, "device 'cuda:128'"),
        (["lab"], 2, "lab is followed by one of bench, simulate, eval"),
        (["pull", "/no\n\x1b/such.gguf"], 1, r"/no\n\x1b/such.gguf"),
    ],
)
def test_wrong_usage_is_one_line(run, args, status, words, tmp_path, monkeypatch):
    """Before the default model is asked for, which this cache has not."""
    monkeypatch.setenv("PPSD_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    got, out, err = run(*args, model=False)
    assert (got, out) == (status, "")
    assert words in err
    assert len(err.strip().splitlines()) == 1
    assert err.startswith("ppsd-run: ")
    assert err.rstrip("\n").isprintable() and len(err) < 400


def test_an_answer_by_a_grammar(run, tmp_path):
    schema, lark = tmp_path / "schema.json", tmp_path / "digits.lark"
    schema.write_text('{"enum": ["left", "right"]}')
    lark.write_text("start: /[0-9]{3}/")
    answers = {}
    for option in ("regex=a{4}", f"schema={schema}", f"lark={lark}"):
        status, answers[option[:5]], _ = run("abc", "--raw", "--grammar", option)
        assert status == 0
    assert answers["regex"] == "aaaa\n"
    assert json.loads(answers["schem"]) in ("left", "right")
    assert len(answers["lark="]) == 4
    assert answers["lark="].strip().isdecimal()
    assert run("abc", "--raw", "-n", 4, "--grammar", "json")[1].startswith("{")
    for option, said in (
        ("xml", "--grammar is json, schema=FILE"),
        ("regex=", "--grammar is json, schema=FILE"),
        ("regex=(((", "the regex is not valid"),
        ("schema=/no/such/file", "/no/such/file does not exist"),
    ):
        status, out, err = run("abc", "-q", "--grammar", option)
        assert (status, out, len(err.splitlines())) == (2, "", 1)
        assert said in err


def test_standard_input_that_is_closed_or_no_text(folder):
    command = f"{quote(sys.executable)} -m ppsd_rt --model {folder} -n 3"
    for line in (
        f"{command} <&-",
        f"{command} --chat <&-",
        f"printf '\\xe5' | PYTHONUTF8=0 {command}",
        f"{command} </dev/null",
        f"{command} x >&-",
        f"{command} --help >&-",
    ):
        result = subprocess.run(["bash", "-c", line], capture_output=True, text=True)
        assert (result.returncode, result.stdout) == (2, "")
        assert result.stderr.splitlines()[-1].startswith("ppsd-run: ")
        assert "Traceback" not in result.stderr


def test_standard_error_that_is_closed_or_full(folder, tmp_path):
    """What would be said there is lost; it neither goes elsewhere nor costs the answer."""
    trace = tmp_path / "trace.json"
    command = f"{quote(sys.executable)} -m ppsd_rt --model {folder} -n 3"
    lines = [f"{command} x --json --trace {trace} <&- 2>&-"]
    lines += [f"{command} x --json 2>/dev/full"] if os.path.exists("/dev/full") else []
    for line in lines:
        result = subprocess.run(["bash", "-c", line], capture_output=True, text=True)
        assert (result.returncode, len(json.loads(result.stdout)["ids"])) == (0, 3)
    assert json.loads(trace.read_text())["traceEvents"]
    result = subprocess.run(["bash", "-c", f"{command} x --schedule warp 2>&-"], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (2, "")


def test_standard_output_that_is_closed_or_full(folder, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(f'{{"id": {i}, "prompt": "{i}"}}\n' for i in range(40)))
    command = f"{quote(sys.executable)} -m ppsd_rt --model {folder} --exit-head none -n 9"
    result = subprocess.run(
        ["bash", "-c", f"{command} --prompts {path} --json | head -n 1"], capture_output=True, text=True
    )
    assert len(result.stdout.splitlines()) == 1
    assert result.stderr == ""
    if os.path.exists("/dev/full"):
        result = subprocess.run(["bash", "-c", f"{command} x >/dev/full"], capture_output=True, text=True)
        assert result.returncode == 1
        assert result.stderr.splitlines()[-1].startswith("ppsd-run: standard output: No space left")
        assert "Traceback" not in result.stderr
        result = subprocess.run(["bash", "-c", f"{command} x --trace /dev/full"], capture_output=True, text=True)
        assert result.returncode == 1
        assert (
            result.stderr.splitlines()[-1] == "ppsd-run: cannot write the trace to /dev/full: No space left on device"
        )


def test_text_that_is_not_utf_8_is_told_from_a_locale_that_is_not(folder):
    """Characters are counted in what the user wrote, not in what the template makes of it."""
    command = f"{quote(sys.executable)} -m ppsd_rt --model {folder} --exit-head none -n 2"
    no_locale = "LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0"
    for line, words in (
        (f"{command} $'h\\xe5'", "character 2 is a lone surrogate (U+DCE5); give it as UTF-8"),
        (f"{command} hi --system $'h\\xe5'", "--system is not valid Unicode: character 2"),
        (f"{no_locale} {command} $'h\\xc3\\xa5'", "LC_ALL=C.UTF-8"),
        (f"printf 'h\\xe5' | {no_locale} {command}", "standard input is not text in UTF-8"),
        (f"printf '\\xff\\xfeh' | {command}", "standard input is not text in UTF-16"),
    ):
        result = subprocess.run(["bash", "-c", line], capture_output=True, text=True)
        assert (result.returncode, result.stdout) == (2, "")
        assert words in result.stderr.splitlines()[-1]


def in_terminal(command, interrupt=False):
    """Run a command in a terminal of its own -> (status, everything it wrote); interrupt it at the first text."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update(TERM="xterm-256color", COLUMNS="100", LINES="40")
        os.execv(sys.executable, [sys.executable, "-m", "ppsd_rt", *map(str, command)])
    written = b""
    while True:
        try:
            data = os.read(terminal, 65536)
        except OSError:
            break
        if not data:
            break
        written += data
        if interrupt and len(written) > 100:  # more than hides the cursor
            os.kill(pid, signal.SIGINT)
            interrupt = False
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), written.decode(errors="replace")


def test_drafts_are_shown_in_colour(folder):
    options = ["--show-drafts", "--model", folder, "--exit-head", "norm:3", "--raw", "-n", "12", "--seed", "1"]
    status, text = in_terminal(["abc", *options, "--temperature", "0.5", "--schedule", "eesd:stop_rule=fixed"])
    assert status == 0
    for colour in ("\x1b[3;35m", "\x1b[32m", "\x1b[31m"):  # draft, accepted, corrected
        assert colour in text
    assert re.search(r"\d+ tokens, (cut by -n|finished) \| ", text)


def test_interrupt_prints_what_there_is_and_the_statistics(tmp_path):
    """The answer is longer than what a terminal takes before it is read, so it cannot end before the signal."""
    folder = write_model(tmp_path / "model", max_position_embeddings=16384)
    options = ["--model", folder, "--raw", "-n", "16000", "--exit-head", "norm:2", "--schedule", "eesd:stop_rule=fixed"]
    status, text = in_terminal(["abc", *options], interrupt=True)
    assert status == 130
    tokens = int(re.search(r"(\d+) tokens, interrupted \|", text)[1])
    assert 1 <= tokens < 16000
    assert "Traceback" not in text
