"""Options and help of every command. Nothing here imports torch, so that `--help` answers at once."""

import argparse
import shlex
from collections.abc import Sequence
from difflib import get_close_matches
from typing import NoReturn

from .. import __version__
from ..errors import UsageError
from ..printable import quoted
from .commands import COMMANDS
from .serve_options import front_options, server_options
from .values import at_most, group, length, named, number, option, setting, whole


class Parser(argparse.ArgumentParser):
    """argparse, with errors as one line."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")

    def parse_args(self, args: Sequence[str], namespace: None = None) -> argparse.Namespace:  # type: ignore[override]
        found, others = self.parse_known_args(args, namespace)
        if others:
            self.error(self._not_understood(others))
        return found

    def _not_understood(self, others: Sequence[str]) -> str:
        option = next(
            (text.partition("=")[0] for text in others if text.startswith("-") and text not in ("-", "--")), None
        )
        if option is None:
            return f"{quoted(others[0])} is one argument too many; put a text of several words in quotes"
        if option in self._options():
            return f"the option {option} must come before --"
        closest = get_close_matches(option, self._options(), n=1)
        return f"unknown option {quoted(option)}" + (f"; did you mean {closest[0]}?" if closest else "")

    def _options(self) -> list[str]:
        """Those of its commands too."""
        names = [name for action in self._actions for name in action.option_strings]
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                names += [name for command in action.choices.values() for name in command._options()]
        return names

    def _print_message(self, message: str, file: object = None) -> None:
        """Help and version, on standard output: argparse itself takes no notice of a disk that is full."""
        print(message, end="", flush=True)


class _Help(argparse.RawDescriptionHelpFormatter):
    """Shows defaults where there are some to show."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=110)

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        shown = action.default not in (None, False, argparse.SUPPRESS, "", 0) and "%(default)" not in text
        # Of lists, and of what ends in brackets, the help says it in its own words.
        shown = shown and not isinstance(action.default, list) and not text.endswith("]")
        return f"{text} [%(default)s]" if shown and action.option_strings else text


def _stages(text: str) -> int | tuple[int, ...]:
    numbers = tuple(map(whole, text.split(",")))
    return numbers if len(numbers) > 1 else numbers[0]


def model_options(parser: Parser) -> None:
    add = group(parser, "model")
    add(
        "-m --model NAME",
        "a local folder, a .gguf file, a hub name (org/name), or the default model",
        named,
        default="smollm2-135m",
    )
    add(
        "--exit-head HEAD",
        "a head's file; the folder or hub name of an EAGLE-3 head; auto: the one that ships for this model; "
        "norm:E: the model's own norm and LM head after layer E; none",
        named,
        default="auto",
    )
    add = group(parser, "machine")
    add("--backend", "auto, cpu (C++), cuda (Triton, captured) or torch", default="auto")
    add("--device", "auto, cpu, cuda, cuda:N, or several GPUs with some layers each: cuda:0,cuda:1", default="auto")
    add("--dtype", "auto, float32, bfloat16, int8 and int4 (cpu, cuda), fp8 (cuda), float16 (torch)", default="auto")
    add(
        "--kv-dtype",
        "of the KV cache (cpu): auto (as the weights; int4: int8), float32, bfloat16, int8",
        default="auto",
    )
    add("--kv-memory SIZE", "for the KV caches of all answers, such as 4G [half of what is spare]")
    add(
        "--threads N",
        "CPU threads [one for each physical core, at most 16; fewer in a container that grants less]",
        whole,
    )
    add(
        "--template-set NAME=JSON",
        "a variable of the chat template, such as enable_thinking=false; `ppsd-run info` lists them",
        setting,
        action="append",
        default=[],
    )
    add(
        "--stages N",
        "cut verification into N stages (cpu, cuda); over ranks or several devices A,B,...: layers for each of "
        "them, else as is best",
        _stages,
        default=1,
    )
    add = group(parser, "ranks (torchrun --nproc-per-node N -m ppsd_rt ...)")
    add("--rank-timeout S", "a rank silent so long is lost", number, default=20.0)
    add("--link-ms T", "delay every message, to try it out [0]", number, default=0.0)


def schedule_options(parser: Parser, default: str = "auto") -> None:
    from ..pipeline.schedule import NAMES  # with numpy, which `ppsd-run --version` does not need
    from ..pipeline.stop_rules import STOP_RULES

    add = group(parser, "schedule (changes the speed, never the answer)")
    add(
        "--schedule NAME",
        f"{', '.join(NAMES)}, with changes as in eesd:length=4,stop_rule=confidence=0.5 or lookup:lookup=2; stop "
        f"rules: {', '.join(STOP_RULES)}; auto is the best on this machine, plain decoding included",
        default=default,
    )


def sampling_options(parser: Parser, max_tokens: int | None = None) -> None:
    add = group(parser, "sampling")
    add(
        "-n --max-tokens N",
        "end after N tokens; -1 or inf: at the end of the context" + " [-1]" * (max_tokens is None),
        length,
        default=max_tokens,
    )
    add("-t --temperature T", "0 is greedy [0]", number, default=0.0)
    add("--top-k K", "keep the K most likely tokens; 0: all [0]", whole, default=0)
    add("--top-p P", "keep the likeliest with probability P", number, default=1.0)
    add("--min-p P", "keep those with P x the best's [0]", number, default=0.0)
    add("--repetition-penalty R", "above 1: repeat less", number, default=1.0)
    add("--presence-penalty R", "off logits of ids answered [0]", number, default=0.0)
    add("--frequency-penalty R", "the same, each time [0]", number, default=0.0)
    add("--seed S", "same seed, same answer [drawn for every answer; --json shows it]", whole)
    add("--stop TEXT", "end before this text; may be given several times", action="append", default=[])


def generate_options(parser: Parser) -> None:
    parser.add_argument("prompt", nargs="?", help="the prompt; what is piped into the command follows it")
    add = group(parser, "input and output")
    add(
        "-f --file FILE",
        "a text that follows the prompt; may be given several times",
        named,
        action="append",
        default=[],
    )
    add(
        "--prompts FILE",
        'answer each line: a text, {"prompt": ...} or {"messages": [...]}, both with "id" if wanted; files of '
        "HumanEval, GSM8K, MT-Bench, XSum, CNN/DM and WMT too; -: standard input",
        named,
    )
    add("--chat", "a conversation; from a pipe each line is a turn")
    add("--system TEXT", "system message [the model's own]")
    add("--raw", "do not apply the chat template")
    add("--plain", "on a terminal: the text as it is, Markdown not rendered")
    add("--json", "print one JSON object per answer")
    add("--grammar G", "what the answer must be: json, schema=FILE or {...}, regex=PATTERN or lark=FILE")
    add("--logprobs N", "with --json: log-probabilities of the tokens and of the N likeliest", whole)
    add("--show-drafts", "colour drafted, accepted and corrected tokens")
    add("--trace FILE", "write a timeline of the stages, for ui.perfetto.dev", named)
    add("-q --quiet", "no statistics and no notes: the answer, and errors")
    add("--compare", "also decode plainly, and print how much faster this was")
    add("--explain", "print what auto predicted and what it measured")
    sampling_options(parser)
    schedule_options(parser)
    _keep_option(parser)
    model_options(parser)


def serve_options(parser: Parser) -> None:
    server_options(parser)
    schedule_options(parser)
    _keep_option(parser)
    model_options(parser)


def engine_options(parser: Parser) -> None:
    front_options(parser)
    model_options(parser)


def list_options(parser: Parser) -> None:
    option(parser, "--json", "print one JSON object for each model")


def rm_options(parser: Parser) -> None:
    parser.add_argument("model", help="as `ppsd-run list` names it")
    option(parser, "--yes", "do not ask")


def pull_options(parser: Parser) -> None:
    parser.add_argument("model", nargs="?", default="smollm2-135m", help="the default model or a hub name")


def convert_options(parser: Parser) -> None:
    parser.add_argument("source", metavar="IN.gguf")
    parser.add_argument("target", metavar="FOLDER", help="must not exist yet, or be empty")
    option(parser, "--dtype", "of the weights: float32, bfloat16 or float16", default="float32")


def distill_options(parser: Parser) -> None:
    add = group(parser, "what to train")
    add(
        "--exit-layer E[,E...]",
        "one head for each, in one pass; 0: on the embeddings [a tenth of the layers: 3 for the default model]",
    )
    kinds = "one head of each, in the same pass: feedback, layer, two-layer, adapter; ngram: only count, in minutes"
    add("--kind KIND[,KIND...]", kinds, default="feedback")
    add(
        "--begin HEAD",
        "a head to go on from; none: the model's last layers [with --prompts the head that ships, else none]",
        named,
    )
    add("--draft-vocabulary N[,N...]", "most frequent ids; 0: all", default="4096")
    add("--intermediate-size N", "neurons of its MLP; 0: as the model [by its width]", whole)
    add("--feedback-rank R", "of its feedback matrices; 0: full [by the same]", whole)
    add("--out FILE.safetensors", "several heads: FILE[-KIND][-E][-vN].safetensors", named, required=True)
    add = group(parser, "data and training")
    add(
        "--prompts FILE",
        "prompts like those that the head is for, one a line or as JSON lines: the model answers them too, and a "
        "tenth of them judges the head",
        named,
    )
    add("--prompts-share S", "of the texts that answer --prompts [0.5]", number, default=0.5)
    add(
        "--tokens N",
        "to sample from the model; rounded up to whole shards, 1024 for each slot [2000000]",
        at_most(10**10),
    )
    add("--hours H", "as many tokens as can be sampled and trained on in H hours", number)
    add(
        "--slots N", "texts sampled side by side; CPU: at most 64 [64; as many as a GPU's memory holds]", at_most(10**5)
    )
    add("--epochs N", "passes over the sampled text", at_most(10**4), default=3)
    add("--batch-tokens N", "answer tokens per step", whole, default=4096)
    add("--learning-rate LR", "at its highest [by the model's width; 0.005 for 576]", number)
    add("--seed S", "same seed, same head [0]", whole, default=0)
    add("--judged-by FILE", "prompts to keep out of the text [the development prompts]", named)
    add("--work FOLDER", "sampled text, checkpoints and log [beside --out]", named)
    add("--text FOLDER", "sampled text that several runs share [the --work folder]", named)
    add("--resume", "go on with what the work folder holds")
    add = group(parser, "model and machine")
    add("-m --model NAME", "as for generating", named, default="smollm2-135m")
    add("--device", "auto, cpu, cuda or cuda:N", default="auto")
    add("--dtype", "of the frozen model and of matrix products", default="auto")
    add("--threads N", "CPU threads [as many as torch chooses]", whole)


def learn_options(parser: Parser) -> None:
    parser.add_argument("folder", metavar="FOLDER", type=named, help="of --learn")
    one = parser.add_mutually_exclusive_group()
    option(one, "--status", "what is kept, and what it has brought")
    option(one, "--back", "use the head before, also in a server that runs")
    option(one, "--forget", "delete all that was kept and learned")
    option(one, "--background PID", argparse.SUPPRESS, whole)  # of whom it ends with
    option(parser, "--threads N", "CPU threads [all cores]", whole)


def _keep_option(parser: Parser) -> None:
    what = "keep ids of prompts and answers there, and learn a better exit head from them while idle [keep nothing]"
    group(parser, "learning")("--learn FOLDER", what, named)


def calibrate_options(parser: Parser) -> None:
    option(parser, "--json", "print it as one JSON object")
    model_options(parser)


def info_options(parser: Parser) -> None:
    calibrate_options(parser)
    option(parser, "--learn FOLDER", "also what is kept there, and what it has brought", named)


SHELLS = ("bash", "zsh", "fish")

_LAB = [name.removeprefix("lab ") for name in COMMANDS if name.startswith("lab ")]
_ELSEWHERE = {  # what other programs have commands for
    "chat": "ppsd-run --chat",
    "run": "ppsd-run PROMPT",
    "help": "ppsd-run --help",
    "version": "ppsd-run --version",
    "train": "ppsd-run distill",
    "ls": "ppsd-run list",
    "models": "ppsd-run list",
    "show": "ppsd-run info",
    "remove": "ppsd-run rm",
    "ps": "ppsd-run list for the models that are here (none stays loaded: a server is a process of its own)",
}


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options of the command that `argv` begins with; without one it is `generate`."""
    if argv and argv[0] == "help":
        argv = [*argv[1:], "--help"]
    if argv and argv[0] in _LAB:  # their names of earlier days, which scripts and results have
        argv = ["lab", *argv]
    if argv and argv[0] == "lab":
        argv = [_in_the_lab(argv[1:]), *argv[2:]]
    named = bool(argv) and argv[0] in COMMANDS
    name = argv[0] if named else "generate"
    if not named and argv and not argv[0].startswith("-") and "--" not in argv:
        _refuse_slip(argv[0])
    args = _build(name).parse_args(argv[1:] if named else argv)
    args.command = name
    if not named and args.prompt is not None and "--" not in argv:
        _refuse_slip(args.prompt)
    return args


def _in_the_lab(argv: Sequence[str]) -> str:
    """The command that `lab` goes on with. UsageError where it is none."""
    if not argv or f"lab {argv[0]}" not in COMMANDS:
        raise UsageError(f"lab is followed by one of {', '.join(_LAB)}: see ppsd-run lab {_LAB[0]} --help")
    return f"lab {argv[0]}"


def complete() -> None:
    """Answers a shell that asks how a command line goes on, and ends; see `--completion`."""
    import argcomplete

    parser = Parser(prog="ppsd-run", allow_abbrev=False)
    commands = parser.add_subparsers()
    lab = commands.add_parser("lab", allow_abbrev=False).add_subparsers()
    for name, command in COMMANDS.items():
        group = lab if name.startswith("lab ") else commands
        command.options(name)(group.add_parser(name.removeprefix("lab "), help=command.summary, allow_abbrev=False))
    generate_options(parser)
    parser._actions = [action for action in parser._actions if action.option_strings or action is commands]
    argcomplete.autocomplete(parser)


def _refuse_slip(word: str) -> None:
    """UsageError for a prompt that must have been meant for a command: a letter or two away from one."""
    known = [*COMMANDS, *_LAB, *_ELSEWHERE]
    twisted = [name for name in known if sorted(name) == sorted(word)]
    closest = twisted or get_close_matches(word, known, n=1, cutoff=0.8)
    if not closest:
        return
    meant = _ELSEWHERE.get(closest[0], f"ppsd-run {closest[0]}")
    said = f"the command {word} comes first" if word in COMMANDS else f"{quoted(word)} is not a command"
    raise UsageError(f"{said}: write {meant} (as a prompt it goes after --: ppsd-run -- {shlex.quote(word)})")


def _build(name: str) -> Parser:
    command = COMMANDS[name]
    default = name == "generate"
    parser = Parser(
        prog="ppsd-run" if default else f"ppsd-run {name}",
        description=_OVERVIEW if default else command.summary[0].upper() + command.summary[1:] + ".",
        epilog="examples:\n" + "\n".join(f"  {example}" for example in command.examples),
        formatter_class=_Help,
        allow_abbrev=False,
    )
    if default:
        parser.add_argument("--version", action="version", version=f"ppsd-rt {__version__}")
        option(
            parser, "--completion", "print what completes commands and options in this shell, and end", choices=SHELLS
        )
    command.options(name)(parser)
    return parser


_WIDTH = max(map(len, COMMANDS))
_OVERVIEW = """Answers from a Llama-family model, drafted by its own early layers: faster, and token for token the same.

commands (each has its own --help; a prompt that is one of these words goes after --):
""" + "\n".join(f"  {name:<{_WIDTH}}  {command.summary}" for name, command in COMMANDS.items())
