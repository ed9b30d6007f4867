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
from .values import at_most, length, named, number, setting, whole


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
    group = parser.add_argument_group("model")
    group.add_argument(
        "-m",
        "--model",
        type=named,
        default="smollm2-135m",
        metavar="NAME",
        help="a local folder, a .gguf file, a hub name (org/name), or the default model",
    )
    group.add_argument(
        "--exit-head",
        type=named,
        default="auto",
        metavar="HEAD",
        help="a head's file; the folder or hub name of an EAGLE-3 head; auto: the one that ships for this model; "
        "norm:E: the model's own norm and LM head after layer E; none",
    )
    group = parser.add_argument_group("machine")
    group.add_argument("--backend", default="auto", help="auto, cpu (C++), cuda (Triton, captured) or torch")
    group.add_argument(
        "--device", default="auto", help="auto, cpu, cuda, cuda:N, or several GPUs with some layers each: cuda:0,cuda:1"
    )
    group.add_argument(
        "--dtype",
        default="auto",
        help="auto, float32, bfloat16, int8 and int4 (cpu, cuda), fp8 (cuda), float16 (torch)",
    )
    group.add_argument(
        "--kv-dtype",
        default="auto",
        help="of the KV cache (cpu): auto (as the weights; int4: int8), float32, bfloat16, int8",
    )
    group.add_argument(
        "--kv-memory",
        metavar="SIZE",
        help="for the KV caches of all answers (cpu, torch), such as 4G [half of what is spare]",
    )
    group.add_argument(
        "--threads",
        type=whole,
        metavar="N",
        help="CPU threads [one for each physical core, at most 16; fewer in a container that grants less]",
    )
    group.add_argument(
        "--template-set",
        type=setting,
        action="append",
        default=[],
        metavar="NAME=JSON",
        help="a variable of the chat template, such as enable_thinking=false; `ppsd-run info` lists them",
    )
    group.add_argument(
        "--stages",
        type=_stages,
        default=1,
        metavar="N",
        help="cut verification into N stages (cpu, cuda); over ranks or several devices A,B,...: layers for each of "
        "them, else as is best",
    )
    group = parser.add_argument_group("ranks (torchrun --nproc-per-node N -m ppsd_rt ...)")
    group.add_argument("--rank-timeout", type=number, default=20.0, metavar="S", help="a rank silent so long is lost")
    group.add_argument(
        "--link-ms", type=number, default=0.0, metavar="T", help="delay every message, to try it out [0]"
    )


def schedule_options(parser: Parser, default: str = "auto") -> None:
    from ..pipeline.schedule import NAMES  # with numpy, which `ppsd-run --version` does not need
    from ..pipeline.stop_rules import STOP_RULES

    group = parser.add_argument_group("schedule (changes the speed, never the answer)")
    group.add_argument(
        "--schedule",
        metavar="NAME",
        default=default,
        help=f"{', '.join(NAMES)}, with changes as in eesd:length=4,stop_rule=confidence=0.5 or lookup:lookup=2; stop "
        f"rules: {', '.join(STOP_RULES)}; auto is the best on this machine, plain decoding included",
    )


def sampling_options(parser: Parser, max_tokens: int | None = None) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "-n",
        "--max-tokens",
        type=length,
        default=max_tokens,
        metavar="N",
        help="end after N tokens; -1 or inf: at the end of the context" + " [-1]" * (max_tokens is None),
    )
    group.add_argument("-t", "--temperature", type=number, default=0.0, metavar="T", help="0 is greedy [0]")
    group.add_argument("--top-k", type=whole, default=0, metavar="K", help="keep the K most likely tokens; 0: all [0]")
    group.add_argument("--top-p", type=number, default=1.0, metavar="P", help="keep the likeliest with probability P")
    group.add_argument("--min-p", type=number, default=0.0, metavar="P", help="keep those with P x the best's [0]")
    group.add_argument("--repetition-penalty", type=number, default=1.0, metavar="R", help="above 1: repeat less")
    group.add_argument(
        "--presence-penalty", type=number, default=0.0, metavar="R", help="off logits of ids answered [0]"
    )
    group.add_argument("--frequency-penalty", type=number, default=0.0, metavar="R", help="the same, each time [0]")
    group.add_argument(
        "--seed", type=whole, metavar="S", help="same seed, same answer [drawn for every answer; --json shows it]"
    )
    group.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be given several times"
    )


def generate_options(parser: Parser) -> None:
    parser.add_argument("prompt", nargs="?", help="the prompt; what is piped into the command follows it")
    group = parser.add_argument_group("input and output")
    group.add_argument(
        "-f",
        "--file",
        action="append",
        default=[],
        type=named,
        metavar="FILE",
        help="a text that follows the prompt; may be given several times",
    )
    group.add_argument(
        "--prompts",
        type=named,
        metavar="FILE",
        help='answer each line: a text, {"prompt": ...} or {"messages": [...]}, both with "id" if wanted; files of '
        "HumanEval, GSM8K, MT-Bench, XSum, CNN/DM and WMT too; -: standard input",
    )
    group.add_argument("--chat", action="store_true", help="a conversation; from a pipe each line is a turn")
    group.add_argument("--system", metavar="TEXT", help="system message [the model's own]")
    group.add_argument("--raw", action="store_true", help="do not apply the chat template")
    group.add_argument("--plain", action="store_true", help="on a terminal: the text as it is, Markdown not rendered")
    group.add_argument("--json", action="store_true", help="print one JSON object per answer")
    group.add_argument(
        "--grammar",
        metavar="G",
        help="what the answer must be: json, schema=FILE or {...}, regex=PATTERN or lark=FILE",
    )
    group.add_argument(
        "--logprobs",
        type=whole,
        metavar="N",
        help="with --json: log-probabilities of the tokens and of the N likeliest",
    )
    group.add_argument("--show-drafts", action="store_true", help="colour drafted, accepted and corrected tokens")
    group.add_argument(
        "--trace", type=named, metavar="FILE", help="write a timeline of the stages, for ui.perfetto.dev"
    )
    group.add_argument("-q", "--quiet", action="store_true", help="no statistics and no notes: the answer, and errors")
    group.add_argument("--compare", action="store_true", help="also decode plainly, and print how much faster this was")
    group.add_argument("--explain", action="store_true", help="print what auto predicted and what it measured")
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
    parser.add_argument("--json", action="store_true", help="print one JSON object for each model")


def rm_options(parser: Parser) -> None:
    parser.add_argument("model", help="as `ppsd-run list` names it")
    parser.add_argument("--yes", action="store_true", help="do not ask")


def pull_options(parser: Parser) -> None:
    parser.add_argument("model", nargs="?", default="smollm2-135m", help="the default model or a hub name")


def convert_options(parser: Parser) -> None:
    parser.add_argument("source", metavar="IN.gguf")
    parser.add_argument("target", metavar="FOLDER", help="must not exist yet, or be empty")
    parser.add_argument("--dtype", default="float32", help="of the weights: float32, bfloat16 or float16")


def distill_options(parser: Parser) -> None:
    group = parser.add_argument_group("what to train")
    group.add_argument(
        "--exit-layer",
        metavar="E[,E...]",
        help="one head for each, in one pass; 0: on the embeddings [a tenth of the layers: 3 for the default model]",
    )
    kinds = "one head of each, in the same pass: feedback, layer, two-layer, adapter; ngram: only count, in minutes"
    group.add_argument("--kind", default="feedback", metavar="KIND[,KIND...]", help=kinds)
    group.add_argument(
        "--begin",
        type=named,
        metavar="HEAD",
        help="a head to go on from; none: the model's last layers [with --prompts the head that ships, else none]",
    )
    group.add_argument("--draft-vocabulary", default="4096", metavar="N[,N...]", help="most frequent ids; 0: all")
    group.add_argument(
        "--intermediate-size",
        type=whole,
        metavar="N",
        help="neurons of its MLP; 0: as the model [by its width]",
    )
    group.add_argument(
        "--feedback-rank", type=whole, metavar="R", help="of its feedback matrices; 0: full [by the same]"
    )
    group.add_argument(
        "--out",
        type=named,
        required=True,
        metavar="FILE.safetensors",
        help="several heads: FILE[-KIND][-E][-vN].safetensors",
    )
    group = parser.add_argument_group("data and training")
    group.add_argument(
        "--prompts",
        type=named,
        metavar="FILE",
        help="prompts like those that the head is for, one a line or as JSON lines: the model answers them too, and a "
        "tenth of them judges the head",
    )
    group.add_argument(
        "--prompts-share", type=number, default=0.5, metavar="S", help="of the texts that answer --prompts [0.5]"
    )
    group.add_argument(
        "--tokens",
        type=at_most(10**10),
        metavar="N",
        help="to sample from the model; rounded up to whole shards, 1024 for each slot [2000000]",
    )
    group.add_argument(
        "--hours", type=number, metavar="H", help="as many tokens as can be sampled and trained on in H hours"
    )
    group.add_argument(
        "--slots",
        type=at_most(10**5),
        metavar="N",
        help="texts sampled side by side; CPU: at most 64 [64; as many as a GPU's memory holds]",
    )
    group.add_argument("--epochs", type=at_most(10**4), default=3, metavar="N", help="passes over the sampled text")
    group.add_argument("--batch-tokens", type=whole, default=4096, metavar="N", help="answer tokens per step")
    group.add_argument(
        "--learning-rate", type=number, metavar="LR", help="at its highest [by the model's width; 0.005 for 576]"
    )
    group.add_argument("--seed", type=whole, default=0, metavar="S", help="same seed, same head [0]")
    group.add_argument(
        "--judged-by", type=named, metavar="FILE", help="prompts to keep out of the text [the development prompts]"
    )
    group.add_argument("--work", type=named, metavar="FOLDER", help="sampled text, checkpoints and log [beside --out]")
    group.add_argument(
        "--text", type=named, metavar="FOLDER", help="sampled text that several runs share [the --work folder]"
    )
    group.add_argument("--resume", action="store_true", help="go on with what the work folder holds")
    group = parser.add_argument_group("model and machine")
    group.add_argument("-m", "--model", type=named, default="smollm2-135m", metavar="NAME", help="as for generating")
    group.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    group.add_argument("--dtype", default="auto", help="of the frozen model and of matrix products")
    group.add_argument("--threads", type=whole, metavar="N", help="CPU threads [as many as torch chooses]")


def learn_options(parser: Parser) -> None:
    parser.add_argument("folder", metavar="FOLDER", type=named, help="of --learn")
    one = parser.add_mutually_exclusive_group()
    one.add_argument("--status", action="store_true", help="what is kept, and what it has brought")
    one.add_argument("--back", action="store_true", help="use the head before, also in a server that runs")
    one.add_argument("--forget", action="store_true", help="delete all that was kept and learned")
    one.add_argument("--background", type=whole, metavar="PID", help=argparse.SUPPRESS)  # of whom it ends with
    parser.add_argument("--threads", type=whole, metavar="N", help="CPU threads [all cores]")


def _keep_option(parser: Parser) -> None:
    group = parser.add_argument_group("learning")
    group.add_argument(
        "--learn",
        type=named,
        metavar="FOLDER",
        help="keep ids of prompts and answers there, and learn a better exit head from them while idle [keep nothing]",
    )


def calibrate_options(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="print it as one JSON object")
    model_options(parser)


def info_options(parser: Parser) -> None:
    calibrate_options(parser)
    parser.add_argument(
        "--learn", type=named, metavar="FOLDER", help="also what is kept there, and what it has brought"
    )


SHELLS = ("bash", "zsh", "fish")

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
    named = bool(argv) and argv[0] in COMMANDS
    name = argv[0] if named else "generate"
    if not named and argv and not argv[0].startswith("-") and "--" not in argv:
        _refuse_slip(argv[0])
    args = _build(name).parse_args(argv[1:] if named else argv)
    args.command = name
    if not named and args.prompt is not None and "--" not in argv:
        _refuse_slip(args.prompt)
    return args


def complete() -> None:
    """Answers a shell that asks how a command line goes on, and ends; see `--completion`."""
    import argcomplete

    parser = Parser(prog="ppsd-run", allow_abbrev=False)
    commands = parser.add_subparsers()
    for name, command in COMMANDS.items():
        command.options()(commands.add_parser(name, help=command.summary, allow_abbrev=False))
    COMMANDS["generate"].options()(parser)
    parser._actions = [action for action in parser._actions if action.option_strings or action is commands]
    argcomplete.autocomplete(parser)


def _refuse_slip(word: str) -> None:
    """UsageError for a prompt that must have been meant for a command: a letter or two away from one."""
    known = [*COMMANDS, *_ELSEWHERE]
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
        parser.add_argument(
            "--completion", choices=SHELLS, help="print what completes commands and options in this shell, and end"
        )
    command.options()(parser)
    return parser


_WIDTH = max(map(len, COMMANDS))
_OVERVIEW = """Answers from a Llama-family model, drafted by its own early layers: faster, and token for token the same.

commands (each has its own --help; a prompt that is one of these words goes after --):
""" + "\n".join(f"  {name:<{_WIDTH}}  {command.summary}" for name, command in COMMANDS.items())
