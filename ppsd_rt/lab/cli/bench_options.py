"""Options of `ppsd-run lab bench` and `lab eval`: most of them take lists, and every combination is measured."""

import argparse
from collections.abc import Callable
from typing import TypeVar

from ...cli.values import named, number, positive, probability, whole
from ...printable import quoted

Item = TypeVar("Item")
_OFF = "off"


def list_of(item: Callable[[str], Item]) -> Callable[[str], list[Item]]:
    """For argparse: `A,B,...`, without doubles."""

    def parse(text: str) -> list[Item]:
        return list(dict.fromkeys(map(item, text.split(","))))

    parse.__name__ = "list"
    return parse


def words(text: str) -> list[str]:
    """For argparse: a list of names."""
    if not all(text.split(",")):
        raise argparse.ArgumentTypeError(f"{quoted(text)} has an empty item")
    return list(dict.fromkeys(text.split(",")))


def acceptance(text: str) -> float | None:
    """`off`: the exit head's own drafts."""
    if text == _OFF:
        return None
    try:
        return probability(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, or {_OFF}") from None


def bench_options(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    for name, summary, example, options in (
        (
            "kernels",
            "single kernels of the C++ backend or, with --device cuda, of the CUDA one",
            "-t 1,2 --rows 1,4,8 --dtype int8,bfloat16",
            _kernel_options,
        ),
        ("generate", "whole answers, every schedule against plain", "-p 64,512 --schedule eesd", _generation_options),
    ):
        command = commands.add_parser(
            name,
            help=summary,
            description=f"Measure {summary}. Cases take turns; figures are medians, ± is half the range.",
            epilog=f"example: ppsd-run lab bench {name} {example}",
            formatter_class=parser.formatter_class,
            allow_abbrev=False,
        )
        options(command)
        _model_options(command)
        _output_options(command)


def _kernel_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what to measure (lists: every combination)")
    numbers = list_of(positive)
    group.add_argument("--kernels", type=words, default=[], metavar="A,B,...", help="qkv, lm_head, ... [all]")
    group.add_argument("--rows", type=numbers, default=[1, 2, 4, 8, 16], metavar="N,N,...", help="[1,2,4,8,16]")
    group.add_argument("--isa", type=words, default=[], metavar="A,B,...", help="instruction sets, or all [the best]")
    group.add_argument("--device", default="cpu", help="cpu, or cuda or cuda:N: the Triton kernels on a GPU [cpu]")
    group.add_argument("--context", type=positive, default=256, metavar="N", help="rows in the KV cache")
    group.add_argument("--dtype", type=words, default=["auto"], metavar="A,B,...", help="number formats [auto]")


def _generation_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what to measure (lists: every combination)")
    numbers = list_of(positive)
    group.add_argument(
        "-p", "--prompt-tokens", type=numbers, metavar="N,N,...", help="lengths of a made-up prompt [64]"
    )
    group.add_argument(
        "--prompts",
        type=named,
        nargs="?",
        const=True,
        metavar="FILE",
        help="answer a file of prompts instead, up to the end of the text [the 34 development prompts]",
    )
    group.add_argument("--limit", type=positive, metavar="N", help="only the first N prompts of each family [all]")
    group.add_argument("-n", "--max-tokens", type=numbers, default=[128], metavar="N,N,...", help="per answer [128]")
    group.add_argument(
        "--schedule",
        action="append",
        metavar="NAME",
        help="as for generating; may be given several times; plain is always measured [auto, with an exit head]",
    )
    group.add_argument(
        "--oracle",
        type=list_of(acceptance),
        default=[None],
        metavar="P,P,...",
        help=f"draft the right token with probability P instead; {_OFF}: the exit head's own drafts [{_OFF}]",
    )
    group.add_argument("--dtype", type=words, default=["auto"], metavar="A,B,...", help="number formats [auto]")
    kv_option(group)
    group.add_argument("--backend", default="auto", help="auto, cpu (C++), cuda (Triton, captured) or torch")
    group.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    group.add_argument("--temperature", type=number, default=0.0, metavar="T", help="0 is greedy [0]")
    group.add_argument("--seed", type=whole, default=0, metavar="S", help="of the sampling [0]")


def kv_option(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--kv-dtype", type=words, default=["auto"], metavar="A,B,...", help="of the KV cache, with each of these [auto]"
    )


def _model_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model and machine")
    group.add_argument("-m", "--model", type=named, default="smollm2-135m", metavar="NAME", help="as for generating")
    group.add_argument("--exit-head", type=named, default="auto", metavar="HEAD", help="as for generating")
    group.add_argument(
        "-t", "--threads", type=list_of(positive), metavar="N,N,...", help="CPU threads [one for each core]"
    )


def _output_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument("-r", "--repeats", type=positive, default=5, metavar="N", help="of every case")
    format_option(group)


def format_option(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "-o",
        "--output",
        choices=("table", "md", "csv", "json", "jsonl"),
        default="table",
        help="table, md, csv, json (one object with everything) or jsonl (a row a line, then the summary)",
    )
    group.add_argument("--save", type=named, metavar="FILE", help="write everything, as with -o json, into a file")


def heads_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("heads", nargs="+", metavar="HEAD", help="files, or as for --exit-head: auto, norm:E")
    group = parser.add_argument_group("what to measure")
    group.add_argument("--prompts", type=named, metavar="FILE", help="as for generating [the 34 development prompts]")
    group.add_argument("--limit", type=positive, metavar="N", help="only the first N prompts of each family [all]")
    group.add_argument("-n", "--max-tokens", type=positive, default=256, metavar="N", help="tokens per answer [256]")
    group.add_argument("--length", type=positive, default=6, metavar="K", help="drafts in a round, at most 15 [6]")
    group.add_argument(
        "--plot", type=named, metavar="FILE", help="acceptance against cost, with lines of equal speed; .svg or .png"
    )
    group = parser.add_argument_group("model and machine")
    group.add_argument("-m", "--model", type=named, default="smollm2-135m", metavar="NAME", help="as for generating")
    group.add_argument("--dtype", default="auto", help="auto, float32, bfloat16, int8 or int4")
    group.add_argument("--threads", type=positive, metavar="N", help="CPU threads [one for each core]")
    format_option(parser.add_argument_group("output"))


def eval_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what to measure")
    group.add_argument(
        "--dtype",
        type=words,
        default=["bfloat16", "int8", "int4"],
        metavar="A,B,...",
        help="number formats, each as FORMAT or BACKEND:FORMAT [bfloat16,int8,int4]",
    )
    kv_option(group)
    group.add_argument("--against", default="float32", metavar="FORMAT", help="what is taken for right")
    group.add_argument(
        "--text", type=named, metavar="FILE", help="a text of some thousand tokens [the one that comes with it]"
    )
    group.add_argument("--window", type=positive, default=512, metavar="N", help="tokens that the model sees at a time")
    group = parser.add_argument_group("model and machine")
    group.add_argument("-m", "--model", type=named, default="smollm2-135m", metavar="NAME", help="as for generating")
    group.add_argument("--backend", default="auto", help="auto, cpu (C++), cuda (Triton, captured) or torch")
    group.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    group.add_argument("--threads", type=positive, metavar="N", help="CPU threads [one for each core]")
    format_option(parser.add_argument_group("output"))
